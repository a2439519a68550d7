"""`CopyingSession`: copies of earlier text as a tree, cut to what pays, and all that is learned from it."""

import time
from collections.abc import Sequence

from ...budget import MOST_NODES, Cost, Survival, Tree, most_per_second
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ..merged import draft_of
from ..prompt_lookup import PromptLookupConfig, PromptLookupSession
from .config import HybridConfig

LOOK_AGAIN = 32
"""rounds after which the draft model is asked again where it has not paid"""


class CopyingSession(DraftSession):
    """What a round drafts stands in one tree per row. Every node of it is judged by the text, verified or not."""

    def __init__(self, context: DraftContext, config: HybridConfig, survival: Survival, cost: Cost) -> None:
        super().__init__(context)
        self.config, self.survival, self.cost = config, survival, cost
        self.lookup = PromptLookupSession(context, config)
        self.trees: list[Tree] = []
        """[B] all that was thought of in this round"""
        self.active: list[int] = []
        """the rows that may draft; others of a lockstep batch are finished"""
        self.chosen: list[list[int]] = []
        """[B] the nodes of each tree that are verified"""
        self.spent = 0.0
        """seconds for which the draft model drafted in this round"""
        self.rounds = self.rested = 0
        """all, and those in which nothing promised to pay"""
        self.opened = False
        """whether the draft model has read the prompt in this round"""
        self._began = 0.0

    def copy(self, sequences: Sequences, budget: list[int]) -> None:
        """A round begins: what followed the same words before."""
        self._began, self.spent, self.opened = time.perf_counter(), 0.0, False
        self.active = [b for b, room in enumerate(budget) if room > 0]
        self.rounds += 1
        self.trees, self.chosen = [Tree() for _ in budget], []
        self.lookup.join(self.trees, sequences, budget, self.survival)

    def ranked(self, tree: Tree) -> list[tuple[int, float]]:
        """Nodes in the order in which they would be verified, with their chances to survive."""
        if self.context.trees:
            return tree.ranked()[:MOST_NODES]
        survival = tree.survival()
        return [(node, survival[node]) for node in tree.best_chain()[:MOST_NODES]]

    def chances(self) -> list[list[float]]:
        """Of each active row's nodes, in order."""
        return [[chance for _, chance in self.ranked(self.trees[b])] for b in self.active]

    def choose(self) -> None:
        """The nodes that pay, of all rows equally many."""
        ranked = [self.ranked(tree) for tree in self.trees]
        if (count := self.cost.tried) is None:
            rows = [[chance for _, chance in ranked[b]] for b in self.active]
            count, _ = most_per_second(rows, self.cost.round(), self.spent, self.context.lockstep)
        self.chosen = [[node for node, _ in row[:count]] for row in ranked]

    def asked(self, pays: bool) -> bool:
        """Whether to ask the draft model: where that pays, and once in a while where it does not."""
        self.cost.unasked = 0 if pays or self.cost.unasked + 1 >= LOOK_AGAIN else self.cost.unasked + 1
        return self.cost.unasked == 0

    def chosen_draft(self) -> Draft:
        """What was chosen."""
        draft = draft_of(self.trees, self.chosen, self.context.device)
        draft.sources = [_source(*row) for row in zip(self.trees, self.chosen, strict=True)]
        return draft

    def estimates(self, row: int) -> Sequence[float | None]:
        """The chance of each node that was verified, behind its parent."""
        return [self.trees[row].chances[node] for node in self.chosen[row]] if self.chosen else []

    def observe(self, verdict: Verdict) -> None:
        if not self.trees:
            return
        if verdict.seconds > 0:  # transformers' own loop does not say
            self.cost.observe_forward(verdict.width, verdict.seconds)
            if not self.opened:
                self.cost.observe_between(time.perf_counter() - self._began - self.spent - verdict.seconds)
        for tree, text in zip(self.trees, verdict.tokens, strict=True):
            for kind, right in tree.judged(text):
                self.survival.observe(kind, right)
        self.trees = []

    def why_rested(self, alpha: float) -> None:
        """Say how often drafting was left out, and why."""
        if self.rested and self.cost.known and self.cost.draft_step is not None:
            self.context.stats.notes.append(
                f"drafting was stopped in {self.rested} of {self.rounds} rounds, as it would have cost more than it "
                f"gained: a draft step costs {self.cost.draft_step / self.cost.round()(1):.2g} of a target step, the "
                f"draft is right {alpha:.0%} of the time"
            )


def _source(tree: Tree, chosen: Sequence[int]) -> str:
    """Who drafted the nodes that are verified."""
    names = {
        PromptLookupConfig.drafter_type if kind[0] == "copied" else "draft_model"
        for node in chosen
        for kind in tree.kinds[node]
        if isinstance(kind, tuple)
    }
    return "+".join(sorted(names)) or "none"
