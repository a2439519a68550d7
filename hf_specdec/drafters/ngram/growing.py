"""`Counted`: what an n-gram model finds likely joins trees; `NGramTrees` drafts it alone."""

from collections.abc import Sequence
from heapq import heappop, heappush

from ...budget import Band, Survival, Tree
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ..merged import TreeSession
from .model import NGramModel

COUNTED = "n-gram"
"""source of these tokens"""
SUCCESSORS = 4
"""tokens that are thought of behind each"""
EXPANDED, BEHIND = 12, 4
"""tokens behind which others are thought of, in a round; and behind a token that another source has drafted"""
LEAST = 0.03
"""chance to get somewhere, below which nothing is thought of behind it"""


class Counted:
    """The likeliest place is gone on from first; each token's chance is what the model gives it, as often as such
    chances came true."""

    likeliest = 0

    def __init__(self, context: DraftContext, model: NGramModel, survival: Survival) -> None:
        self.context, self.model, self.survival = context, model, survival
        self.texts: dict[int, list[int]] = {}
        """[row] its last tokens"""

    def observe_prompt(self, verdict: Verdict) -> None:
        """Nothing is learned from it."""

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add to each row's tree what may come behind its accepted tokens, at most `budget` deep."""
        self.texts = {
            row: mine[-self.model.order :] for row, mine in zip(sequences.rows, sequences.tokens, strict=True)
        }
        for tree, row, room in zip(trees, sequences.rows, budget, strict=True):
            self._grow(tree, -1, row, room, EXPANDED)

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what may come behind a node of a row's tree, within `room` of the root."""
        self._grow(tree, node, row, room, BEHIND)

    def observe(self, verdict: Verdict) -> None:
        """Trees are judged by whoever has them."""

    def close(self) -> None:
        """The call is over."""

    def _grow(self, tree: Tree, node: int, row: int, room: int, most: int) -> None:
        if self.context.forbids is not None:  # it would have to be asked about every place anew
            return
        places = [(-1.0, node)]
        """less the chance to get there, and the node"""
        for _ in range(most):
            if not places:
                return
            here, parent = heappop(places)
            path = tree.text(parent)
            if len(path) >= room:
                continue
            for rank, (token, said) in enumerate(self._behind(self.texts[row] + path)):
                band = Band.of((COUNTED, rank > 0), said)
                right = self.survival.calibrated(band)
                child = tree.add(parent, token, right, band)
                if here * right <= -LEAST and token not in self.context.eos_token_ids:
                    heappush(places, (here * right, child))

    def _behind(self, text: Sequence[int]) -> list[tuple[int, float]]:
        return self.model.likeliest(text, SUCCESSORS if self.context.trees else 1)


class NGramTrees(TreeSession):
    """Greedy: as much as pays of what an n-gram model finds likely."""

    def __init__(self, context: DraftContext, model: NGramModel, survival: Survival) -> None:
        self.counted = Counted(context, model, survival)
        super().__init__(context, survival)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.counted.join(self.begin(len(budget)), sequences, budget)
        return self.draft()
