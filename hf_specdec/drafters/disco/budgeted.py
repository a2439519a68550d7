"""`BudgetedSession`: the budget's decision with the classifier's chances, in place of a threshold."""

from typing import TYPE_CHECKING

from ...budget import DraftCost, Stepwise, Survival, why_rested
from ...protocol import DraftContext, Verdict
from .classifier import StopClassifier
from .config import DiscoConfig
from .session import DiscoSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNMEASURED = 4
"""tokens of a round before anything was measured"""


class BudgetedSession(DiscoSession):
    """Draws on while that promises most tokens per second for the whole batch, or not at all, by what the classifier
    says of the tokens that are there."""

    weighs = True

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel",
        config: DiscoConfig,
        classifier: StopClassifier,
        survival: Survival,
        cost: DraftCost,
    ) -> None:
        """
        Args:
            survival: how often drafts were right, by what the classifier said of them.
            cost: of this draft's steps, its classifier among them.
        """
        super().__init__(context, model, config, classifier)
        self.stepwise, self.draft_cost = Stepwise(survival), cost

    def window(self) -> int:
        """The most that may be drafted; 0 where not even one token pays."""
        cost, rows = self.context.cost, len(self.rows)
        if cost.tried(rows) == 0:
            return 0
        pays = self._pays([[]] * rows, [True] * rows)
        price = self.draft_cost.asked(pays, cost, rows, steps=1)
        self.price = price or 0.0
        return 0 if price is None else super().window()

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        goes_on = self._pays(self.seen, [n > step + 1 for n in lengths])
        return lengths if goes_on else [min(n, step + 1) for n in lengths]

    def _pays(self, seen: list[list[float]], open: list[bool]) -> bool:
        """Whether another step does."""
        cost, step, opening = self.context.cost, self.draft_cost.step, self.draft_cost.opening
        if step is None or not cost.known:
            return max(map(len, seen)) < UNMEASURED
        return self.stepwise.pays(seen, open, cost.round(len(seen)), step, self.context.advance, opening)

    def observe(self, verdict: Verdict) -> None:
        told = zip(self.seen, verdict.drafted, verdict.accepted, strict=bool(self.seen))
        for seen, drafted, accepted in told:
            self.stepwise.observe(seen[:drafted], accepted)
        self.seen = []
        super().observe(verdict)

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.stepwise.alpha)
