"""Calls that nobody sees, made to record or to measure: what drafts in them, and when they end."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria

from ..drafters.base import Drafter
from ..protocol import Draft, DraftContext, Feature, Sequences
from ..session import DraftSession
from ..target.buffers import WIDTHS


class EveryWidth(Drafter):
    """Its drafts have one width after the other, as chains and as trees. Nobody expects them to be right."""

    proposes_trees = True

    def __init__(self, drafter: Drafter | None = None, widths: Sequence[int] = WIDTHS) -> None:
        """
        Args:
            drafter: for whose calls they are.
            widths: tokens per row of the forwards.
        """
        super().__init__()
        self.drafter, self.widths = drafter, widths

    def start(self, context: DraftContext) -> DraftSession:
        if self.drafter is None:
            return _Widths(context, self.widths)
        asked = self.drafter.start(context)
        asked.close()
        return _Widths(context, self.widths, asked.features, asked.likeliest)


class _Widths(DraftSession):
    weighs = True

    def __init__(
        self, context: DraftContext, widths: Sequence[int], features: Sequence[Feature] = (), likeliest: int = 0
    ) -> None:
        """
        Args:
            features: that the forwards give; those that give others are other recordings.
        """
        super().__init__(context)
        self.features, self.likeliest = features, likeliest
        self.shapes = cycle([(width, tree) for width in widths for tree in (False, True)])

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        width, tree = next(self.shapes)
        tokens, above = [1] * (width - 1), -1 if tree and self.context.trees else None
        rows = [(tokens, [above] * len(tokens) if above is not None else list(range(-1, width - 2))) for _ in room]
        return Draft.from_trees(rows)


class Until(StoppingCriteria):
    """Ends a call after so many new tokens as are enough; buffers are as long as the call's own end says."""

    def __init__(self, enough: Callable[[int], bool]) -> None:
        self.enough, self.tokens = enough, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # type: ignore[override]
        self.tokens += 1
        return torch.full((len(input_ids),), self.enough(self.tokens), device=input_ids.device)
