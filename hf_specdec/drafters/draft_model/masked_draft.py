"""`MaskedDraft`: a draft model that drafts all places at once, from masks behind the text (PARD, An et al. 2025, arXiv
2504.18583). It is a causal language model with a `pard_token` in its config, trained to foretell at such tokens."""

from typing import Any

import torch

from ...clock import mark
from ...protocol import Sequences
from ...transfer import to_device
from ..drawn import Drawn, by_text, with_room
from ..steps import Several, Step
from .model_draft import ModelDraft

MOST_MASKED = 12
"""tokens of a round, as its authors draft them"""


def mask_of(model: Any) -> int | None:
    """The token at which a model drafts in parallel; None where it does not."""
    found = getattr(model.config.get_text_config(decoder=True), "pard_token", None)
    return found if type(found) is int and found >= 0 else None


class MaskedDraft(ModelDraft):
    """One forward of the draft model per round."""

    at_once = independent = True

    def __init__(self, *arguments: Any, mask: int) -> None:
        """
        Args:
            arguments: as of `ModelDraft`.
            mask: the token.
        """
        super().__init__(*arguments)
        self.mask, self.blind = mask, True
        self._all: Several
        """that this round has drafted"""

    def room(self, sequences: Sequences) -> int:
        return min(super().room(sequences), MOST_MASKED)

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        super().begin(sequences, steps)
        over, here, count = self._over, self._round, planned or steps
        assert over is not None and here is not None, "the round has begun"
        ids = with_room(sequences, count).clone()
        behind = to_device(here.lengths, ids.device)[:, None] + torch.arange(count - 1, device=ids.device)
        ids.scatter_(1, behind, self.mask)
        logits, drawn = (
            over.places(ids, here.lengths, count),
            Drawn(by_text(self.context, sequences, count, self.candidates)),
        )
        for i in range(count):
            drawn.draw(logits[:, i])
        tokens, *more = drawn.all()
        here.first = here.ended = mark(self._device)
        beside = more[0] if more else None
        self._all = Several(tokens, q=beside) if self.candidates is None else Several(tokens, chances=beside)

    def several(self, count: int) -> Several:
        begun, self.steps = self.steps, self.steps + count
        return self._all.part(begun, count)

    def step(self) -> Step:
        return self.several(1).only

    @property
    def chains(self) -> bool:
        return False

    @property
    def drafts_early(self) -> bool:
        return False
