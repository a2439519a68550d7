"""`TreeSession`: a session that thinks of a tree of tokens per row and offers its nodes, the likeliest first.

Several sources may add to the same trees (`Joining`): a token that two of them propose is one node. Nodes that
are chosen by their chances, whatever their tokens, are each a `Node`.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from ..budget import Acceptance, Tree
from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..session import DraftSession

MANY = 8
"""Rows of a batch from which on the engine may also pause drafting altogether (`DraftSession.weighs`). Thinking of
tokens for so many rows takes a noticeable part of a round, even where none of them is verified."""


class Joining(Protocol):
    """A source of tokens that adds to the trees of a session."""

    likeliest: int
    """how many of the target's likeliest tokens it reads at each place"""

    def observe_prompt(self, verdict: Verdict) -> None:
        """The target has read the prompt."""

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what may follow its accepted tokens, at most `room` deep."""

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what may follow a node of a row's tree; no node gets deeper than `room`."""

    def named(self, trees: Sequence[Tree], nodes: Sequence[Sequence[int]]) -> list[str]:
        """[B] who proposes these nodes of each row's tree, for the statistics."""

    def observe(self, verdict: Verdict) -> None:
        """A round is over: rows have grown, and some have ended."""

    def close(self) -> None:
        """The call is over."""


class TreeSession(DraftSession):
    """Learns from every node of a round's trees, verified or not: the text shows whether it was right."""

    most: int | None = None
    """nodes that a row offers at most; None for all"""

    def __init__(self, context: DraftContext, acceptance: Acceptance, others: Joining | None = None) -> None:
        """
        Args:
            acceptance: how often tokens with the same evidence were right.
            others: a source whose tokens join the session's own.
        """
        super().__init__(context)
        self.weighs = context.rows < MANY or context.most_rows > 0
        self.acceptance = acceptance
        self.others = others
        self.likeliest = 0 if others is None else others.likeliest
        self.trees: list[Tree] = []
        """[B] all tokens of this round"""
        self.ordered: list[list[int]] = []
        """[B] the nodes that each row offers, the likeliest first"""

    def observe_prompt(self, verdict: Verdict) -> None:
        if self.others is not None:
            self.others.observe_prompt(verdict)

    def begin(self, rows: int) -> list[Tree]:
        """A round begins: an empty tree for each row."""
        self.trees, self.ordered = [Tree() for _ in range(rows)], []
        return self.trees

    def ranked(self, row: int) -> list[tuple[int, float]]:
        """A row's nodes in the order in which they would be verified, with their chances to survive."""
        tree = self.trees[row]
        return (tree.ranked() if self.context.trees else tree.chain())[: self.most]

    def draft(self) -> Draft:
        """The trees' nodes as point masses with their chances, of which the engine verifies those that pay."""
        ranked = [self.ranked(b) for b in range(len(self.trees))]
        draft, self.ordered = draft_of(self.trees, ranked, self.context.device)
        if self.others is not None:
            draft.sources = self.others.named(self.trees, self.ordered)
        return draft

    def estimates(self, row: int) -> Sequence[float | None]:
        """The chance of each node, behind its parent."""
        return [self.trees[row].chances[node] for node in self.ordered[row]] if self.ordered else []

    def observe(self, verdict: Verdict) -> None:
        self.acceptance.observe_trees(self.trees, verdict.tokens)
        self.trees, self.ordered = [], []
        if self.others is not None:
            self.others.observe(verdict)

    def close(self) -> None:
        if self.others is not None:
            self.others.close()


class Node(NamedTuple):
    """The candidate `rank` (from 0) of the place `place` (from 0), behind the node `parent` (-1 the last accepted
    token)."""

    parent: int
    place: int
    rank: int


def likeliest_nodes(
    chances: Sequence[Sequence[float]], most: int, goes_on: Callable[[Node], bool] = lambda node: True
) -> list[tuple[float, Node]]:
    """The `most` likeliest nodes of the full product, each after its parent, with their chance to be accepted.

    Args:
        chances: [γ][k] how often a candidate is right where all before it were.
        goes_on: whether any node stands behind this one.
    """
    order = itertools.count()
    heap = [(-chance, next(order), Node(-1, 0, rank)) for rank, chance in enumerate(chances[0])]
    heapq.heapify(heap)
    found: list[tuple[float, Node]] = []
    while heap and len(found) < most:
        negative, _, node = heapq.heappop(heap)
        if not negative < 0:
            break
        found.append((-negative, node))
        if node.place + 1 < len(chances) and goes_on(node):
            parent, place = len(found) - 1, node.place + 1
            for rank, chance in enumerate(chances[place]):
                heapq.heappush(heap, (negative * chance, next(order), Node(parent, place, rank)))
    return found


def tested_behind(
    nodes: Sequence[Node | None], accepted: Sequence[tuple[int, int | None]]
) -> Iterator[tuple[Node, bool]]:
    """Of a row's verified nodes those that hang on an accepted one, and whether each was right.

    Args:
        nodes: None for one that is not asked about.
        accepted: -1 for the root, or an accepted node, with the one that was accepted behind it, if one was.
    """
    for parent, right in accepted:
        for i, node in enumerate(nodes):
            if node is not None and node.parent == parent:
                yield node, i == right


def onward_from(tree: Tree, tip: int | None) -> float:
    """The chance to get behind this node, and that nobody says yet what is right there; 0 for no node."""
    if tip is None:
        return 0.0
    told = sum(tree.chances[node] for node in tree.children(tip))
    here = tree.survival()[tip] if tip >= 0 else 1.0
    return here * max(0.0, 1 - told)


def draft_of(
    trees: Sequence[Tree], ranked: Sequence[Sequence[tuple[int, float]]], device: torch.device
) -> tuple[Draft, list[list[int]]]:
    """A draft of point masses from nodes of each row's tree, and those nodes.

    Args:
        ranked: [B] nodes with their chances to survive, each node after its parent.
    """
    nodes = [[node for node, _ in row] for row in ranked]
    cut = [tree.cut(mine) for tree, mine in zip(trees, nodes, strict=True)]
    draft = Draft.from_trees(cut, device)
    draft.survival = [[chance for _, chance in row] for row in ranked]
    return draft, nodes
