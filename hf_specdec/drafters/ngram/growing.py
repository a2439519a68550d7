"""`NGramTrees`: what an n-gram model finds likely, as a tree of which as much is verified as pays."""

from heapq import heappop, heappush

from ...budget import Acceptance, Evidence, Tree
from ...protocol import Draft, DraftContext, Sequences
from ..tree_session import TreeSession
from .model import NGramModel

SUCCESSORS = 4
"""tokens that are thought of behind each"""
EXPANDED = 12
"""tokens behind which others are thought of, in a round"""
LEAST = 0.03
"""chance to get somewhere, below which nothing is thought of behind it"""


class NGramTrees(TreeSession):
    """Greedy. The likeliest place is gone on from first; each token's chance is what the model gives it, as often as
    such chances came true."""

    def __init__(self, context: DraftContext, model: NGramModel, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.model, self.successors = model, SUCCESSORS if context.trees else 1

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        for tree, tokens, room in zip(self.begin(len(budget)), sequences.tokens, budget, strict=True):
            self._grow(tree, tokens[-self.model.order :], room)
        return self.draft()

    def _grow(self, tree: Tree, text: list[int], room: int) -> None:
        """Add to a row's tree, at most `room` deep, what may come behind its text."""
        places = [(-1.0, -1)]
        """less the chance to get there, and the node"""
        for _ in range(EXPANDED):
            if not places:
                return
            here, node = heappop(places)
            path = tree.text(node)
            if len(path) == room:
                continue
            for rank, (token, said) in enumerate(self.model.likeliest(text + path, self.successors)):
                evidence = Evidence.of("n-gram", min(rank, 1)).at(said)
                right = self.acceptance.calibrated(evidence)
                child = tree.add(node, token, right, evidence)
                if here * right <= -LEAST and token not in self.context.eos_token_ids:
                    heappush(places, (here * right, child))
