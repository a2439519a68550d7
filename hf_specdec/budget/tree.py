"""`Tree`: what several sources draft for one row, each token once."""

from collections.abc import Iterable, Sequence
from operator import itemgetter

from .evidence import Evidence

Candidate = tuple[int, float, tuple[Evidence, ...]]
"""A token, its chance to be right where its parent was, and what its fate is counted under."""


class Tree:
    """Nodes in order of their adding, so that a parent comes before its children; -1 is the last accepted token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.chances: list[float] = []
        """of each node, to be right where its parent was"""
        self.evidence: list[tuple[Evidence, ...]] = []
        """of each node, what its fate is counted under"""
        self.at: dict[tuple[int, int], int] = {}
        """(parent, token) → the node of a token behind its parent"""
        self._below: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float, *evidence: Evidence) -> int:
        """The node of a token behind `parent`: a new one, or the one that is there, which is as likely as the better
        of those who say so."""
        self.add_all(parent, [(token, chance, evidence)])
        return self.at[parent, token]

    def add_all(self, parent: int, candidates: Iterable[Candidate]) -> list[int]:
        """As `add`, tokens beside each other; those of their nodes that are new."""
        first = len(self.tokens)
        for token, chance, evidence in candidates:
            node = self.at.setdefault((parent, token), len(self.tokens))
            if node < len(self.tokens):
                self.chances[node] = max(self.chances[node], chance)
                self.evidence[node] = tuple(dict.fromkeys(self.evidence[node] + evidence))
                continue
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(chance)
            self.evidence.append(evidence)
        new = list(range(first, len(self.tokens)))
        self._below.setdefault(parent, []).extend(new)
        return new

    def merge(self, other: "Tree") -> None:
        """Add all that another tree says."""
        place = {-1: -1}
        for node, evidence in enumerate(other.evidence):
            parent = place[other.parents[node]]
            place[node] = self.add(parent, other.tokens[node], other.chances[node], *evidence)

    def children(self, node: int) -> Sequence[int]:
        """Nodes right behind one."""
        return self._below.get(node, ())

    def text(self, node: int) -> list[int]:
        """The tokens from the root down to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def along(self, text: Sequence[int]) -> list[int]:
        """The nodes from the root down that say what a text says, as far as there are such."""
        nodes: list[int] = []
        here = -1
        for token in text:
            if (node := self.at.get((here, token))) is None:
                break
            nodes.append(node)
            here = node
        return nodes

    def survival(self) -> list[float]:
        """The chance of each node that it and all above it are right."""
        chances: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            chances.append(chance * (chances[parent] if parent >= 0 else 1.0))
        return chances

    def ranked(self) -> list[tuple[int, float]]:
        """All nodes with their chances to survive, the likeliest first, each after its parent."""
        return sorted(enumerate(self.survival()), key=itemgetter(1), reverse=True)  # stable: parents before children

    def chain(self) -> list[tuple[int, float]]:
        """The path from the root that promises most tokens, with the nodes' chances to survive."""
        survival = self.survival()
        promise, onward = list(survival), [-1] * len(self)
        root, best = -1, 0.0
        for node in reversed(range(len(self))):
            parent = self.parents[node]
            if parent < 0:
                root, best = (node, promise[node]) if promise[node] >= best else (root, best)
            elif survival[parent] + promise[node] > promise[parent]:
                promise[parent], onward[parent] = survival[parent] + promise[node], node
        chain = []
        while root >= 0:
            chain.append((root, survival[root]))
            root = onward[root]
        return chain

    def cut(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents of these nodes, each of which comes after its parent."""
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return [self.tokens[node] for node in nodes], [place[self.parents[node]] for node in nodes]

    def tested(self, text: Sequence[int]) -> list[tuple[int, bool]]:
        """The nodes that a text has tested, those that hang on it, and whether each was right."""
        above = [-1, *(right := self.along(text))][: len(text)]
        return [(node, node in right) for each in above for node in self.children(each)]


def are_chains(rows: Sequence[Sequence[int]]) -> bool:
    """Whether each node's parent is the one before it, in the parents of every row."""
    return all(list(parents) == list(range(-1, len(parents) - 1)) for parents in rows)
