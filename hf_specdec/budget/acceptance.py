"""`Acceptance`: how often drafted tokens turn out right, by the evidence for them."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .evidence import EDGES, Evidence, Proposer
from .tree import Candidate, Tree

PRIOR = 4.0
"""tests that a guess counts as: a first surprise is not yet a rule"""
MEMORY = 0.99
"""weight of the past at each test: about the last hundred count, so that the shares follow the text"""
NEVER = 0.0, 0.0
"""right and tested, of what was never seen"""
CENTRES = [sum(edges) / 2 for edges in pairwise((0.0, *EDGES, 1.0))]


class Acceptance:
    """By evidence, the share of tokens that were right where all tokens before them were: a count that forgets, begun
    with a guess. Evidence has few values: the counts do not grow with the text."""

    def __init__(self) -> None:
        self._seen: dict[Evidence, tuple[float, float]] = {}
        self._bands: dict[tuple[tuple[Proposer, ...], bool | None], list[tuple[Evidence, float]]] = {}

    def chance(self, evidence: Evidence, guess: float) -> float:
        """
        Args:
            guess: what to begin with, from 0 to 1.
        """
        right, tested = self._seen.get(evidence, NEVER)
        return (right + PRIOR * guess) / (tested + PRIOR)

    def calibrated(
        self, sources: Sequence[Evidence], estimates: Sequence[float], agrees: bool | None = None
    ) -> list[tuple[Evidence, float]]:
        """What speaks for tokens to which their sources give such estimates, and their chances. A higher estimate never
        has a lower one.

        Args:
            sources: [n] without an estimate.
            estimates: [n] from 0 to 1.
            agrees: as in `Evidence`.
        """
        found = []
        for source, estimate in zip(sources, estimates, strict=True):
            kind = source.sources, agrees
            if (bands := self._bands.get(kind)) is None:
                bands = self._bands[kind] = self._pooled(*kind)
            found.append(bands[bisect(EDGES, estimate)])
        return found

    def observe(self, evidence: Evidence, right: bool) -> None:
        """One token with this evidence was tested."""
        before, tested = self._seen.get(evidence, NEVER)
        self._seen[evidence] = MEMORY * before + right, MEMORY * tested + 1
        if evidence.band is not None:
            self._bands.pop((evidence.sources, evidence.agrees), None)

    def add(self, tree: Tree, parent: int, candidates: Iterable[Candidate]) -> None:
        """Add tokens beside each other that a source proposes. Where others propose one already, both together are its
        evidence: a source that speaks alone is judged by where it spoke alone.

        Args:
            candidates: each with the evidence of this source, without an estimate, and the chance of such tokens.
        """
        alone: list[Candidate] = []
        for candidate in candidates:
            token, chance, (evidence,) = candidate
            node, (source,) = tree.at.get((parent, token)), evidence.sources
            if node is None or len(tree.evidence[node]) != 1 or tree.evidence[node][0].band is not None:
                alone.append(candidate)  # which is new, or counted otherwise
                continue
            (known,) = tree.evidence[node]
            names = [other.name for other in known.sources]
            if names == [source.name]:
                alone.append(candidate)
            elif source.name not in names:
                together = known._replace(sources=(*known.sources, source))
                best = max(chance, tree.chances[node])
                tree.evidence[node], tree.chances[node] = (together,), self.chance(together, best)
        tree.add_all(parent, alone)

    def observe_trees(self, trees: Sequence[Tree], texts: Sequence[Sequence[int]]) -> None:
        """What became of the nodes of each row's tree that its text has tested, verified or not."""
        for tree, text in zip(trees, texts, strict=bool(trees)):
            for node, right in tree.tested(text):
                for evidence in tree.evidence[node]:
                    self.observe(evidence, right)

    def _pooled(self, sources: tuple[Proposer, ...], agrees: bool | None) -> list[tuple[Evidence, float]]:
        """Their bands, with the chances; neighbours that would fall are taken together until all rise."""
        kinds = [Evidence(sources, agrees, band) for band in range(len(CENTRES))]
        pools: list[tuple[float, float, int]] = []
        for evidence, centre in zip(kinds, CENTRES, strict=True):
            right, tested = self._seen.get(evidence, NEVER)
            right, tested, bands = right + PRIOR * centre, tested + PRIOR, 1
            while pools and pools[-1][0] / pools[-1][1] > right / tested:
                lower = pools.pop()
                right, tested, bands = right + lower[0], tested + lower[1], bands + lower[2]
            pools.append((right, tested, bands))
        chances = [right / tested for right, tested, bands in pools for _ in range(bands)]
        return list(zip(kinds, chances, strict=True))
