"""`HeadSession`: what sessions of all heads have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import SpeculationError, warn
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...target.buffers import NO_MEMORY, FixedCache
from ...target.cache import RaggedCache
from .context import HeadContext, News
from .drawn import Draw, Drawn, by_text
from .recorded import Recorded, can_be_recorded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_attention(config: PreTrainedConfig) -> None:
    """Refuse kernels that do not take masks of rows of different lengths.

    Raises:
        SpeculationError: with what to load the heads with.
    """
    kind = config._attn_implementation
    if kind not in (None, "eager", "sdpa"):
        raise SpeculationError(
            f"the heads use {kind!r} attention, which does not support rows of different lengths; load their "
            'model with attn_implementation="sdpa"'
        )


class HeadSession(DraftSession):
    """A session of heads, which read the target's hidden states. Subclasses write `draft`."""

    forwards = 1
    """of a draft"""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel",
        device: torch.device,
        layers: Sequence[int],
        most: int,
        again: int = 0,
        beyond: int = 0,
    ) -> None:
        """
        Args:
            model: the heads.
            device: where they are.
            layers, again: as of `HeadContext`.
            most, beyond: as of `Recorded`.
        """
        super().__init__(context)
        self.model, self.device, self.most = model, device, most
        self.features, self.read = layers, HeadContext(context, layers, model.config, device, again)
        self.recorded: Recorded | None = None
        if can_be_recorded(context, model, device):
            self.recorded = Recorded(context, model, self.read, most, beyond)

    @abstractmethod
    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        """Read the news into the cache, and draw at most so many tokens per row behind them. It asks the device
        nothing; a step that is recorded does the same whenever news of this shape come again."""

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.read.follow(sequences.rows)
        most = min(max(room), self.most)
        if most < 1:
            return Draft.from_lists([[]] * len(room), self.context.device)
        tokens, *q = self._drafted(sequences, most)
        return Draft(tokens[:, :most], [min(most, n) for n in room], q=q[0][:, :most] if q else None)

    def _drafted(self, sequences: Sequences, most: int) -> tuple[Tensor, ...]:
        """At least so many tokens [B, K], and q [B, K, V] where they are drawn at random."""
        self.context.stats.draft_calls += self.forwards
        cache = self.read.over()
        if self.recorded is not None and isinstance(cache, FixedCache):
            return self.recorded.drafted(self.draft, cache, sequences)
        drawn = Drawn(by_text(self.context, sequences, most))
        self.draft(self.read.news(), cache, most, drawn.draw)
        if self.recorded is not None:
            try:
                self.read.cache = self.recorded.taken_over(self.read.over())
            except torch.OutOfMemoryError:
                warn(NO_MEMORY)
                self.recorded = None
        return drawn.all()

    def observe_prompt(self, verdict: Verdict) -> None:
        self.read.observe_prompt(verdict)

    def observe(self, verdict: Verdict) -> None:
        self.read.observe(verdict)
