"""`DraftToken`: a drafted token, and what is known of q at its place without a question to the worker."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...transfer import to_device

TOLD = 64
"""tokens whose q travels with a drafted token"""


class DraftToken(NamedTuple):
    """A drafted token. Where the draft samples, the likeliest tokens of q are known. No other token has more than the
    last of them: q is known as a whole where that has nothing, as behind `top_k` below 64."""

    token: int
    q: float = 1.0
    """of the token; 1 where the draft does not sample"""
    likely: Sequence[int] = ()
    """the likeliest tokens, in descending order; none where the draft does not sample"""
    chances: Sequence[float] = ()
    """q of these"""

    def bounds(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Between what q of tokens y [N] lies, [N] each; the same twice where it is known."""
        likely, chances = to_device(self.likely, y.device), to_device(self.chances, y.device, torch.float32)
        same = y[:, None] == likely
        known = (same * chances).sum(-1)
        return known, torch.where(same.any(-1), known, chances[-1])

    def can_be(self, vocab: int, sampled: bool) -> bool:
        """Whether this can be a drafted token."""
        return (
            all(isinstance(token, int) and 0 <= token < vocab for token in (self.token, *self.likely))
            and 0 < self.q <= 1.0001
            and all(0 <= chance <= 1.0001 for chance in self.chances)
            and all(before >= behind for before, behind in pairwise(self.chances))
            and len(self.likely) == len(self.chances)
            and bool(self.likely) == sampled
        )


DraftTokens = Sequence[DraftToken]
"""one behind the other"""
