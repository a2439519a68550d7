"""`TreeSession`: what one or several sources draft stands in one tree per row, in the order of its worth."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..budget import Acceptance, Tree
from ..protocol import Draft, DraftContext, DraftSession, Sequences, Verdict

MANY = 8
"""rows of a batch that ends as one, from which on it is asked, too, whether drafting pays at all: to think of tokens
for all of them, and to verify none, takes a noticeable part of a round"""


class Joining(Protocol):
    """A source of tokens that joins trees."""

    likeliest: int
    """of the target's likeliest tokens at each place, how many it reads"""

    def observe_prompt(self, verdict: Verdict) -> None:
        """The prompt was read."""

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add to each row's tree what may come behind its accepted tokens, at most `budget` deep."""

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what may come behind a node of a row's tree, within `room` of the root."""

    def named(self, trees: Sequence[Tree], nodes: Sequence[Sequence[int]]) -> list[str]:
        """[B] who proposes these nodes of each row's tree, for the statistics."""

    def observe(self, verdict: Verdict) -> None:
        """Rows have grown, and some have ended."""

    def close(self) -> None:
        """The call is over."""


class TreeSession(DraftSession):
    """Every node of a round's trees is judged by the text, whether it was verified or not."""

    most: int | None = None
    """nodes that a row offers at most; None for all that there are"""

    def __init__(self, context: DraftContext, acceptance: Acceptance, others: Joining | None = None) -> None:
        """
        Args:
            others: whose tokens stand in the same trees as the session's own.
        """
        super().__init__(context)
        self.weighs = context.rows < MANY or context.most_rows > 0
        self.acceptance = acceptance
        """how often tokens of each kind have been right"""
        self.others = others
        self.likeliest = 0 if others is None else others.likeliest
        self.trees: list[Tree] = []
        """[B] all that was thought of in this round"""
        self.ordered: list[list[int]] = []
        """[B] the nodes of each tree that may be verified, the likeliest first"""

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
        """The trees' nodes with their chances; point masses, of which the engine verifies those that pay."""
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


def draft_of(
    trees: Sequence[Tree], ranked: Sequence[Sequence[tuple[int, float]]], device: torch.device
) -> tuple[Draft, list[list[int]]]:
    """Nodes of each row's tree with their chances, each after its parent, as point masses; a chain where every row has
    one. And the nodes."""
    nodes = [[node for node, _ in row] for row in ranked]
    cut = [tree.cut(mine) for tree, mine in zip(trees, nodes, strict=True)]
    draft = Draft.from_trees(cut, device)
    draft.survival = [[chance for _, chance in row] for row in ranked]
    return draft, nodes
