"""`Survival`: how often drafted tokens turn out right, by what speaks for them."""

from bisect import bisect
from collections.abc import Hashable
from itertools import pairwise

PRIOR = 4.0
"""observations that a guess counts as"""
MEMORY = 0.99
"""weight of the past at each observation of a kind, so that the figures follow the text"""
EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""between bands of estimates"""
CENTRES = [sum(edges) / 2 for edges in pairwise((0.0, *EDGES, 1.0))]


class Survival:
    """By kind of token, the share that was right where all tokens before it were. Kinds are few: it does not grow with
    the text."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def chance(self, kind: Hashable, guess: float) -> float:
        """
        Args:
            guess: what to begin with, from 0 to 1.
        """
        right, tested = self._seen.get(kind, (0.0, 0.0))
        return (right + PRIOR * guess) / (tested + PRIOR)

    def observe(self, kind: Hashable, right: bool) -> None:
        """One token of this kind was tested."""
        before, tested = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = MEMORY * before + right, MEMORY * tested + 1


def band(estimate: float) -> int:
    """Estimates from 0 to 1 that are taken for alike."""
    return bisect(EDGES, estimate)


def centre(index: int) -> float:
    """The middle of a band."""
    return CENTRES[index]
