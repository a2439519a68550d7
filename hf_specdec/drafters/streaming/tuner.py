"""`TreeTuner`: the tree by measured acceptance of every (stream, rank), against the time of a wider forward."""

from collections.abc import Collection, Sequence
from typing import Any

from ...budget import MOST_NODES, CostView, most_per_second
from ...protocol import Verdict
from .config import StreamingConfig
from .tree import Node, level_by_level, likeliest_nodes, product_tree

PRIOR = 24.0
"""observations that the trained figures count as"""
MEMORY = 0.98
TRIED_LATER = 4
LOOK_AGAIN = 64
"""rounds after which a small tree is tried where none has paid"""
EVERY = 8
"""rounds between two choices: a tree that comes again has its masks ready"""


class TreeTuner:
    """Chooses the tree, and learns from what becomes of it."""

    def __init__(self, config: StreamingConfig, do_sample: bool) -> None:
        self.config = config
        tables = [config.acceptance_sampled, config.acceptance]
        table: list[Any] = next(filter(None, tables if do_sample else reversed(tables)), [])
        self.chances = _whole(table, config.num_streams, config.num_candidates)
        """[γ][k] how often a candidate was right where all before it were"""
        self.weights = [[PRIOR] * config.num_candidates for _ in range(config.num_streams)]
        self.rounds = 0
        self._likeliest: list[tuple[float, Node]] = []
        self._nodes: list[Node] = []

    def tree(self, trees: bool, cost: CostView, rows: int) -> list[Node]:
        """The next tree's nodes for so many rows, in order of depth; a chain where `trees` are not welcome."""
        config = self.config
        if not trees:
            chain = product_tree(config.num_streams, 1)
            return chain if config.num_nodes == "auto" else chain[: config.num_nodes]
        if config.tree == "product":
            self._nodes = self._nodes or product_tree(config.num_streams, config.num_candidates)
            return self._nodes
        if not self._nodes or self.rounds % EVERY == 0 or cost.tried(rows) is not None:
            self._likeliest = likeliest_nodes(self.chances, MOST_NODES)
            count = self._count_that_pays(cost, rows)
            self._nodes = level_by_level([node for _, node in self._likeliest[:count]])
        self.rounds += 1
        return self._nodes

    def _count_that_pays(self, cost: CostView, rows: int) -> int:
        if self.config.num_nodes != "auto":
            return int(self.config.num_nodes)
        if (tried := cost.tried(rows)) is not None:
            return tried
        count, _ = most_per_second([[chance for chance, _ in self._likeliest]], cost.round(rows))
        return count or (TRIED_LATER if self.rounds % LOOK_AGAIN == 0 else 0)

    def observe(
        self,
        verdict: Verdict,
        drafted: Sequence[Sequence[Node | None]],
        tested: Sequence[Collection[int]] | None = None,
    ) -> None:
        """What was accepted.

        Args:
            drafted: [B][K] of each row's nodes those of the streams; None for copied ones.
            tested: [B] the nodes that there were logits for; None for all.
        """
        draft = verdict.draft
        if draft is None:
            return
        width = draft.tokens.shape[1] + 1
        for b, nodes in enumerate(drafted):
            if not verdict.stopped[b]:
                parents = range(-1, width - 2) if draft.parents is None else draft.parents[b]
                path = verdict.paths[b]
                ended = bool(path) and tested is not None and path[-1] not in tested[b]
                self._count(path, nodes[: draft.lengths[b]], parents, ended)

    def _count(self, path: Sequence[int], nodes: Sequence[Node | None], parents: Sequence[int], ended: bool) -> None:
        """Behind every accepted node, which of those that were tried was right. Where a pruned one `ended` the row,
        none was tried behind it."""
        steps = list(zip([-1, *path], [*path, None], strict=True))
        for parent, right in steps[:-1] if ended else steps:
            for i, node in enumerate(nodes):
                if node is not None and parents[i] == parent:
                    chance, weight = self.chances[node.stream][node.rank], self.weights[node.stream][node.rank]
                    self.chances[node.stream][node.rank] = (chance * weight + (i == right)) / (weight + 1)
                    self.weights[node.stream][node.rank] = min(weight + 1, 1 / (1 - MEMORY))


def _whole(table: Sequence[Sequence[float]], gamma: int, k: int) -> list[list[float]]:
    """A table of this size: what a trained one does not say is guessed."""
    guessed = [[0.5 * 0.35**rank for rank in range(k)] for _ in range(gamma)]
    for guess, row in zip(guessed, table, strict=False):
        guess[: len(row[:k])] = [float(chance) for chance in row[:k]]
    return guessed
