"""`BitwiseJoiningRunner`: rows that come and go, none of which changes another's logits by one bit."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from ..errors import SpeculationError
from .buffers import FEWEST, WIDEST, power_of_two, slots_for
from .cache import RaggedCache
from .capturable import sums_by_distance, why_not_captured
from .captured import alike
from .captured_cache import CapturedCache
from .captured_joining import CapturedJoiningRunner
from .compiled import compiles
from .inputs import position_limit
from .joining import SPARE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BitwiseJoiningRunner(CapturedJoiningRunner):
    """A `CapturedJoiningRunner` whose forwards are all of one shape, but for widths that round alike: over buffers with
    room for all rows, each of which has the same share of the slots, whoever is there."""

    def __init__(self, model: "PreTrainedModel", most_rows: int, most_slots: int) -> None:
        """
        Raises:
            SpeculationError: the shares are too small.
        """
        super().__init__(model, most_rows, most_slots)
        self.shares = power_of_two(most_rows)
        if self.shares * FEWEST > most_slots:
            raise SpeculationError(
                f"max_tokens={most_slots} is too little for max_rows={most_rows}: with forwards='bitwise' the cache is "
                f"divided by {self.shares}, and each share must be {FEWEST} tokens or more; set max_tokens to "
                f"{self.shares * FEWEST} or more, or lower max_rows"
            )
        share = 1 << ((most_slots // self.shares).bit_length() - 1)
        self.columns = min(share, slots_for(position_limit(model) + SPARE)) - 2 * WIDEST

    @cached_property
    def pads_to(self) -> Sequence[int]:  # type: ignore[override]
        """
        Raises:
            SpeculationError: the model's forwards cannot be alike.
        """
        self._check()
        return alike(self.model, self.shares, self.columns, self.sums_by_distance)

    @cached_property
    def sums_by_distance(self) -> bool:  # type: ignore[override]
        return sums_by_distance(self.model)

    def _check(self) -> None:
        if why := _why_not(self.model):
            raise SpeculationError(
                f"forwards='bitwise' is not possible: {type(self.model).__name__} {why}; change that, or let "
                "BatchDecoder have other forwards"
            )

    def _begin(self, read: Cache) -> RaggedCache:
        self._check()
        cache = CapturedCache(read, [self.model], self.shares, self.columns)
        cache.whole = True
        return cache

    def slots_for(self, rows: list[int]) -> int:
        return self.shares * slots_for(max(rows, default=0) + SPARE)

    def _fit(self) -> None:
        """Nobody is let in who does not fit."""


def _why_not(model: "PreTrainedModel") -> str:
    """What keeps forwards from being alike, in words that go on from the model's name; empty if nothing."""
    if model.dtype == torch.float16:
        return "is in float16, where what overflows in one row spoils the next one in its place (load it in bfloat16)"
    if compiles(model):
        return "is compiled, for each shape in another way"
    return why_not_captured(model)
