"""`DraftToken`: a drafted token, and the distribution that it was drawn from."""

from collections.abc import Sequence
from typing import NamedTuple

LIKELY = 256
"""tokens that can be drawn, the likeliest ones: so few that q can travel with each drafted token"""


class DraftToken(NamedTuple):
    """A drafted token. Where the draft samples, q is known: other tokens than `likely` had no chance."""

    token: int
    likely: Sequence[int] = ()
    """tokens that could be drawn; none where the draft does not sample"""
    chances: Sequence[float] = ()
    """of these"""

    @property
    def chance(self) -> float:
        """Of the token; 1 where the draft does not sample."""
        return self.chances[self.likely.index(self.token)] if self.likely else 1.0

    def can_be(self, vocab: int, sampled: bool) -> bool:
        """Whether this can be a drafted token."""
        if not all(isinstance(token, int) and 0 <= token < vocab for token in (self.token, *self.likely)):
            return False
        if not sampled:
            return not self.likely and not self.chances
        fine = self.token in self.likely and len(set(self.likely)) == len(self.likely) == len(self.chances)
        return fine and min(self.chances) >= 0 < self.chance and abs(sum(self.chances) - 1) < 1e-3


DraftTokens = Sequence[DraftToken]
"""one behind the other"""
