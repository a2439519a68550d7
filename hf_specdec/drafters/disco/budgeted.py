"""`BudgetedSession`: the budget's decision with the classifier's chances, in place of a threshold."""

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from ...budget import Band, DraftCost, Survival, steps_that_pay
from ...protocol import DraftContext, Verdict
from ..draft_model.window import LOOK_AGAIN, why_rested
from .classifier import StopClassifier
from .config import DiscoConfig
from .session import DiscoSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFTED, SAID = "drafted", "said"
"""kind of every token, and the classifier's family of estimates"""
FIRST_GUESS = 0.6
UNMEASURED = 4
"""tokens of a round before anything was measured"""


class BudgetedSession(DiscoSession):
    """Drafts on while that promises most tokens per second for the whole batch, or not at all.

    Chances are those of the classifier as they came true so far. What is decided after a token is about the next one,
    which nobody has drawn yet, and all that is drawn is verified: the output keeps the target's distribution.
    """

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
        self.survival, self.draft_cost = survival, cost

    def window(self) -> int:
        """The most that may be drafted; 0 where not even one token pays."""
        pays = self._pays([[] for _ in self.rows], [1.0] * len(self.rows), 0)
        return super().window() if self.draft_cost.asked(pays, LOOK_AGAIN) else 0

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        rows = [self._survivals(seen) for seen in self.seen]
        onward = [row[-1] if n > step + 1 else 0.0 for row, n in zip(rows, lengths, strict=True)]
        goes_on = self._pays(rows, onward, step + 1)
        return lengths if goes_on else [min(n, step + 1) for n in lengths]

    def _survivals(self, seen: list[float]) -> list[float]:
        """The chance of each token of a row, that it and all before it are kept."""
        return list(accumulate((self.survival.calibrated(Band.of(SAID, chance)) for chance in seen), mul))

    def _pays(self, rows: list[list[float]], onward: list[float], steps: int) -> bool:
        """Whether another step does; `steps` were made."""
        cost, step = self.context.cost, self.draft_cost.step
        if step is None or not cost.known:
            return steps < UNMEASURED
        seconds, lockstep = cost.round(len(rows)), self.context.lockstep
        return steps_that_pay(rows, onward, [self._alpha()], seconds, step, steps * step, lockstep) > 0

    def _alpha(self) -> float:
        """How often the draft is right."""
        return self.survival.chance(DRAFTED, FIRST_GUESS)

    def observe(self, verdict: Verdict) -> None:
        for seen, drafted, accepted in zip(self.seen, verdict.drafted, verdict.accepted, strict=bool(self.seen)):
            for i, chance in enumerate(seen[: min(drafted, accepted + 1)]):
                self.survival.observe(DRAFTED, i < accepted)
                self.survival.observe(Band.of(SAID, chance), i < accepted)
        self.seen = []
        super().observe(verdict)

    def close(self) -> None:
        c = self.draft_cost.c(self.context.cost, len(self.context.prompt_ids))
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self._alpha())
