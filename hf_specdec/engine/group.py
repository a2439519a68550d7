"""`Group`: rows whose tokens are chosen in the same way."""

from copy import copy
from dataclasses import dataclass

from ..verify.judging import Judge
from ..verify.randomness import Randomness, RowRandomness
from .drafting import Drafting


@dataclass(eq=False)
class Group:
    """Who chooses their tokens, and who drafts them."""

    judge: Judge
    randomness: Randomness
    """the judge's"""
    drafting: Drafting | None = None
    """may draft for other groups, too; None where nobody drafts"""

    def admit(self, row: int, own: Randomness) -> None:
        """A row that has randomness of its own joins."""
        for randomness in self._of_rows():
            randomness.of[row] = own if randomness is self.randomness else copy(own)

    def forget(self, row: int) -> None:
        """A row has left."""
        for randomness in self._of_rows():
            randomness.of.pop(row, None)

    def _of_rows(self) -> list[RowRandomness]:
        """Where each row has randomness of its own, the judge's and the drafter's."""
        both = [self.randomness, *([] if self.drafting is None else [self.drafting.randomness])]
        return [randomness for randomness in both if isinstance(randomness, RowRandomness)]
