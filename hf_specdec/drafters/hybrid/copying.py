"""`CopyingSession`: copies of earlier text in a tree, and whether to ask the draft model as well."""

from ...budget import Cost, DraftCost, Survival
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ..merged import TreeSession
from ..prompt_lookup import Copies, PromptLookupConfig
from .config import HybridConfig

LOOK_AGAIN = 32
"""rounds after which the draft model is asked again where it has not paid"""


class CopyingSession(TreeSession):
    """Copies are what every round begins with."""

    def __init__(self, context: DraftContext, config: HybridConfig, survival: Survival, draft_cost: DraftCost) -> None:
        super().__init__(context, survival)
        self.config, self.draft_cost = config, draft_cost
        self.cost: Cost = context.cost
        self.copies = Copies(context, config, survival)
        self.active: list[int] = []
        """the rows that may draft; others of a lockstep batch are finished"""
        self.rounds = self.rested = 0
        """all, and those in which nothing promised to pay"""
        self.declined = False
        """whether the draft model did not promise to pay in this round"""

    def copy(self, sequences: Sequences, budget: list[int]) -> None:
        """A round begins: what followed the same words before."""
        self.active = [b for b, room in enumerate(budget) if room > 0]
        self.rounds += 1
        self.copies.join(self.begin(len(budget)), sequences, budget)

    def chances(self) -> list[list[float]]:
        """Of each active row's nodes, in order."""
        return [[chance for _, chance in self.ranked(b)] for b in self.active]

    def asked(self, pays: bool) -> bool:
        """Whether to ask the draft model: where that pays, and once in a while where it does not."""
        cost = self.draft_cost
        cost.unasked = 0 if pays or cost.unasked + 1 >= LOOK_AGAIN else cost.unasked + 1
        return cost.unasked == 0

    def draft(self) -> Draft:
        draft = super().draft()
        draft.sources = [self._source(b) for b in range(len(self.trees))]
        return draft

    def _source(self, row: int) -> str:
        """Who drafted the nodes of a row."""
        names = {
            PromptLookupConfig.drafter_type if kind[0] == "copied" else "draft_model"
            for node in self.ordered[row]
            for kind in self.trees[row].kinds[node]
            if isinstance(kind, tuple)
        }
        return "+".join(sorted(names)) or "none"

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        self.rested += self.declined and not any(verdict.drafted)

    def why_rested(self, alpha: float) -> None:
        """Say how often drafting was left out, and why."""
        step = self.draft_cost.step
        if self.rested and self.cost.known and step is not None:
            c = step / self.cost.round(len(self.trees) or 1)(1)
            self.context.stats.notes.append(
                f"drafting was stopped in {self.rested} of {self.rounds} rounds, as it would have cost more than it "
                f"gained: a draft step costs {c:.2g} of a target step, the draft is right {alpha:.0%} of the time"
            )
