"""`HeadDraft`: what all heads have in common when they draft."""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...budget import DraftCost
from ...clock import mark
from ...errors import SpeculationError, warn
from ...protocol import DraftContext, Feature, Sequences, Verdict
from ...target.buffers import NO_MEMORY, CapturedCache
from ...target.cache import RaggedCache
from ...target.recorded import recordings
from ..steps import Step, Steps, Took
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


class HeadDraft(Steps):
    """Heads, which read the target's hidden states and draft all places of a round at once. Subclasses write
    `draft`."""

    blind = at_once = True
    forwards = 1
    """of a draft"""
    candidates: int | None = None
    """k, the likeliest tokens of each place, with their chances; None for one token as the call's sampling picks it"""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel",
        device: torch.device,
        features: Sequence[Feature],
        most: int,
        again: int = 0,
        beyond: int = 0,
        held: PreTrainedConfig | None = None,
    ) -> None:
        """
        Args:
            model: the heads.
            device: where they are.
            features, again: as of `HeadContext`.
            most, beyond: as of `Recorded`.
            held: of the layers whose keys and values are kept; None for the heads' own.
        """
        self.context, self.model, self.device, self.most = context, model, device, most
        self.read = HeadContext(context, features, held or model.config, device, again)
        # Behind a prompt that is no tokens nothing is drafted.
        self.features = features if context.most_rows or context.prompt_ids.shape[1] else ()
        self.cost = DraftCost()
        """told what drafts take"""
        self._ahead = deque[Step]()
        """what this round has drafted and nobody has asked for yet"""
        self._took: Took | None = None
        self._opened = 0
        """tokens of prompts that this round has read"""
        self._usual = True
        """whether it has read no more than a round before it had added"""
        self.recorded: Recorded | None = None
        if can_be_recorded(context, model, device):
            self.recorded = Recorded(context, model, self.read, most, beyond)

    @abstractmethod
    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        """Read the news into the cache, and draw at most so many tokens per row behind them. It asks the device
        nothing; a step that is recorded does the same whenever news of this shape come again."""

    @property
    def unread(self) -> int:
        return self.read.unopened

    def room(self, sequences: Sequences) -> int:
        return self.most if self.features else 0

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self.read.follow(sequences.rows)
        self._opened, self.steps = self.read.unopened, 0
        self._usual = not self._opened and self.read.unread <= self.most + 1 + self.read.again
        began, recorded, count = mark(self.device), len(recordings), planned or steps
        tokens, *more = self._drafted(sequences, count)
        ended = mark(self.device)
        self._took = Took(tokens.shape[1], began, ended if self.at_once else None, ended, len(recordings) > recorded)
        drawn = tokens[:, :count].unbind(1)
        beside = more[0].unbind(1) if more else [None] * len(drawn)
        if self.candidates is None:
            self._ahead = deque(Step(mine, q=q) for mine, q in zip(drawn, beside, strict=False))
        else:
            self._ahead = deque(Step(mine, chances=chances) for mine, chances in zip(drawn, beside, strict=False))

    def _drafted(self, sequences: Sequences, most: int) -> tuple[Tensor, ...]:
        """At least so many places, as `Drawn.all` gives them."""
        self.context.stats.draft_calls += self.forwards
        self._read_alone(sequences)
        cache = self.read.over()
        if self.recorded is not None and isinstance(cache, CapturedCache):
            return self.recorded.drafted(self.draft, cache, sequences, self.candidates)
        drawn = Drawn(by_text(self.context, sequences, most, self.candidates))
        self.draft(self.read.news(sequences.tokens), cache, most, drawn.draw)
        if self.recorded is not None:
            try:
                self.read.cache = self.recorded.taken_over(self.read.over())
            except torch.OutOfMemoryError:
                warn(NO_MEMORY)
                self.recorded = None
        return drawn.all()

    def _read_alone(self, sequences: Sequences) -> None:
        """Rows that have joined others read their prompts by themselves: beside them every row would take as long."""
        texts, new = dict(zip(sequences.rows, sequences.tokens, strict=True)), self.read.new
        for row in new if len(new) < len(texts) else ():
            cache, news = self.read.empty(1), self.read.news_of(row, texts[row])
            drawn = Drawn(lambda logits, i: (logits.argmax(-1),))  # which nobody asks for
            self.draft(news, cache, 1, drawn.draw)
            self.read.join(row, cache)

    def step(self) -> Step:
        self.steps += 1
        return self._ahead.popleft()

    def observe_prompt(self, verdict: Verdict) -> None:
        if self.features:
            self.read.observe_prompt(verdict)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        if self._took is not None:
            if self._opened and not self._took.recorded:
                self.cost.observe_reading(self._took.ended.since(self._took.began), self._opened)
            self._took.tell(self.cost, self._usual)
            self._took = None
        self.steps = 0
        if self.features:
            self.read.observe(verdict)
