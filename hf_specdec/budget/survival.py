"""`Survival`: how often drafted tokens turn out right, by what speaks for them."""

from bisect import bisect
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .tree import Tree

PRIOR = 4.0
"""observations that a guess counts as"""
MEMORY = 0.99
"""weight of the past at each observation of a kind, so that the figures follow the text"""
EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""between bands of estimates"""
CENTRES = [sum(edges) / 2 for edges in pairwise((0.0, *EDGES, 1.0))]


class Band(NamedTuple):
    """A kind of token: those of one family whose estimates, from 0 to 1, are taken for alike."""

    family: Hashable
    step: int
    """from the lowest"""

    @classmethod
    def of(cls, family: Hashable, estimate: float) -> "Band":
        return cls(family, bisect(EDGES, estimate))


def speakers(kinds: Sequence[Hashable]) -> list[Hashable]:
    """The sources of a node's only kind, of which it may have several; none where it is counted otherwise."""
    if len(kinds) != 1 or isinstance(kinds[0], Band) or not isinstance(kinds[0], tuple):
        return []
    parts = kinds[0] if isinstance(kinds[0][0], tuple) else kinds
    return [part[0] for part in parts if isinstance(part, tuple)]


class Survival:
    """By kind of token, the share that was right where all tokens before it were. Kinds are few: it does not grow with
    the text."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, float]] = {}
        self._rising: dict[Hashable, list[float]] = {}

    def chance(self, kind: Hashable, guess: float) -> float:
        """
        Args:
            guess: what to begin with, from 0 to 1.
        """
        right, tested = self._counted(kind, guess)
        return right / tested

    def add(self, tree: Tree, parent: int, token: int, kind: tuple[Hashable, ...], guess: float) -> int:
        """The node of a token for which a source speaks; where another one speaks for it already, both together are a
        kind, and of tokens for which one speaks alone nobody is told how often it is right in company.

        Args:
            kind: its first part names the source.
        """
        node, chance = tree.at(parent, token), self.chance(kind, guess)
        said = [] if node is None else speakers(tree.kinds[node])
        if node is None or not said or said == [kind[0]]:
            return tree.add(parent, token, chance, kind)
        if kind[0] not in said:
            (known,) = tree.kinds[node]
            together = (*(known if len(said) > 1 else (known,)), kind)  # type: ignore[misc]
            tree.kinds[node], tree.chances[node] = (together,), self.chance(together, max(chance, tree.chances[node]))
        return node

    def calibrated(self, band: Band) -> float:
        """The chance of tokens with such an estimate. A higher estimate of its family never has a lower one."""
        chances = self._rising.get(band.family)
        if chances is None:
            chances = self._rising[band.family] = self._pooled(band.family)
        return chances[band.step]

    def observe(self, kind: Hashable, right: bool) -> None:
        """One token of this kind was tested."""
        before, tested = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = MEMORY * before + right, MEMORY * tested + 1
        if isinstance(kind, Band):
            self._rising.pop(kind.family, None)

    def observe_trees(self, trees: Sequence[Tree], texts: Sequence[Sequence[int]]) -> None:
        """What became of the nodes of each row's tree that its text has tested, verified or not."""
        for tree, text in zip(trees, texts, strict=bool(trees)):
            for kind, right in tree.judged(text):
                self.observe(kind, right)

    def _counted(self, kind: Hashable, guess: float) -> tuple[float, float]:
        right, tested = self._seen.get(kind, (0.0, 0.0))
        return right + PRIOR * guess, tested + PRIOR

    def _pooled(self, family: Hashable) -> list[float]:
        """Its bands' chances; neighbours that would fall are taken together, until all rise."""
        pools: list[tuple[float, float, int]] = []
        for index, centre in enumerate(CENTRES):
            right, tested, bands = *self._counted(Band(family, index), centre), 1
            while pools and pools[-1][0] / pools[-1][1] > right / tested:
                lower = pools.pop()
                right, tested, bands = right + lower[0], tested + lower[1], bands + lower[2]
            pools.append((right, tested, bands))
        return [right / tested for right, tested, bands in pools for _ in range(bands)]
