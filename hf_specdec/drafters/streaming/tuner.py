"""`TreeTuner`: the tree by measured acceptance of every (stream, rank), against the time of a wider forward."""

from collections.abc import Sequence

from ...protocol import Verdict
from ...stats import SpeculationStats
from ...theory import line_through
from ..draft_model.window import running_mean
from .config import MOST_NODES, StreamingConfig
from .tree import Joined, Node, joined, level_by_level, likeliest_nodes, most_valuable, product_tree

PRIOR = 24.0
"""observations that the trained figures count as"""
MEMORY = 0.98
START = 12
"""nodes while no time has been measured"""
EVERY = 8
"""rounds between two choices: a tree that comes again has its masks ready"""


class TreeTuner:
    """Chooses the tree, and learns from what becomes of it."""

    def __init__(self, config: StreamingConfig, do_sample: bool) -> None:
        self.config = config
        table = config.acceptance_sampled if do_sample else config.acceptance
        self.chances = _whole(table, config.num_streams, config.num_candidates)
        """[γ][k] how often a candidate was right where all before it were"""
        self.weights = [[PRIOR] * config.num_candidates for _ in range(config.num_streams)]
        self.seconds: dict[int, float] = {}
        """of verification forwards, by tokens fed per row"""
        self.rounds = self.rested = 0
        self._likeliest: list[tuple[float, Node]] = []
        self._nodes: list[Node] = []

    def tree(self, trees: bool) -> list[Node]:
        """The next tree's nodes, in order of depth; a chain where `trees` are not welcome."""
        config = self.config
        if config.tree == "product" or not trees:
            return product_tree(config.num_streams, config.num_candidates if trees else 1)
        if self.rounds % EVERY == 0:
            self._likeliest = likeliest_nodes(self.chances, MOST_NODES)
            count = self.count([chance for chance, _ in self._likeliest])
            self._nodes = level_by_level([node for _, node in self._likeliest[:count]])
        self.rounds += 1
        self.rested += not self._nodes
        return self._nodes

    def joined(self, tokens: Sequence[Sequence[int]], copied: Sequence[int], alpha: float) -> list[Joined]:
        """The next tree of a row that has a copy, too; arguments as in `tree.joined`."""
        nodes = joined(self._likeliest, tokens, copied, alpha)
        return level_by_level(nodes[: self.count([node.chance for node in nodes])])

    def count(self, chances: Sequence[float]) -> int:
        """How many of the likeliest nodes to draft."""
        if self.config.num_nodes != "auto":
            return int(self.config.num_nodes)
        return most_valuable(chances, line_through(dict(self.seconds))) if len(self.seconds) > 1 else START

    def observe(self, verdict: Verdict, drafted: Sequence[Sequence[Node | None]]) -> None:
        """What was accepted, and how long it took.

        Args:
            drafted: [B][K] of each row's nodes those of the streams; None for copied ones.
        """
        draft = verdict.draft
        if draft is None:
            return
        width = draft.tokens.shape[1] + 1
        self.seconds[width] = running_mean(self.seconds.get(width), verdict.seconds)
        for b, nodes in enumerate(drafted):
            if not verdict.stopped[b]:
                parents = range(-1, width - 2) if draft.parents is None else draft.parents[b]
                self._count(verdict.paths[b], nodes[: draft.lengths[b]], parents)

    def _count(self, path: Sequence[int], nodes: Sequence[Node | None], parents: Sequence[int]) -> None:
        """Behind every accepted node, which of those that were tried was right."""
        for parent, right in zip([-1, *path], [*path, None], strict=True):
            for i, node in enumerate(nodes):
                if node is not None and parents[i] == parent:
                    chance, weight = self.chances[node.stream][node.rank], self.weights[node.stream][node.rank]
                    self.chances[node.stream][node.rank] = (chance * weight + (i == right)) / (weight + 1)
                    self.weights[node.stream][node.rank] = min(weight + 1, 1 / (1 - MEMORY))

    def note(self, stats: SpeculationStats) -> None:
        """Why drafts were left out, if they were."""
        if self.rested:
            stats.notes.append(f"in {self.rested} of {self.rounds} rounds no tree promised to pay for itself")


def _whole(table: Sequence[Sequence[float]], gamma: int, k: int) -> list[list[float]]:
    """A table of this size: what a trained one does not say is guessed."""
    guessed = [[0.5 * 0.35**rank for rank in range(k)] for _ in range(gamma)]
    for guess, row in zip(guessed, table, strict=False):
        guess[: len(row[:k])] = [float(chance) for chance in row[:k]]
    return guessed
