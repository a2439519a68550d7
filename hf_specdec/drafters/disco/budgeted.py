"""`BudgetedSession`: the budget's decision with the classifier's chances, in place of a threshold."""

from collections.abc import Callable, Sequence
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


class Budget:
    """Whether one more draft step pays, by what was said of each token and how often that came true."""

    def __init__(self, survival: Survival) -> None:
        self.survival = survival

    @property
    def alpha(self) -> float:
        """How often the draft is right."""
        return self.survival.chance(DRAFTED, FIRST_GUESS)

    def pays(
        self,
        seen: Sequence[Sequence[float]],
        open: Sequence[bool],
        seconds: Callable[[int], float],
        step: float,
        lockstep: bool = False,
    ) -> bool:
        """
        Args:
            seen: [B][any] what was said of the tokens that each row has drafted.
            open: [B] whether a row drafts on.
            seconds: duration of a round by the width of its forward.
            step: seconds of a draft step.
        """
        rows = [self._survivals(said) for said in seen]
        steps = max(map(len, rows), default=0)
        kept = [row[-1] if row else 1.0 for row in rows]
        onward = [chance * goes_on for chance, goes_on in zip(kept, open, strict=True)]
        return steps_that_pay(rows, onward, [self.alpha], seconds, step, steps * step, lockstep) > 0

    def _survivals(self, said: Sequence[float]) -> list[float]:
        """The chance of each token of a row, that it and all before it are kept."""
        return list(accumulate((self.survival.calibrated(Band.of(SAID, chance)) for chance in said), mul))

    def observe(self, said: Sequence[float], accepted: int) -> None:
        """Of a row's drafted tokens the first so many were accepted."""
        for i, chance in enumerate(said[: accepted + 1]):
            self.survival.observe(DRAFTED, i < accepted)
            self.survival.observe(Band.of(SAID, chance), i < accepted)


class BudgetedSession(DiscoSession):
    """Drafts on while that promises most tokens per second for the whole batch, or not at all.

    Chances are those of the classifier as they came true so far. What is decided after a token is about the next one,
    which nobody has drawn yet, and all that is drawn is verified: the output keeps the target's distribution.
    """

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
        self.budget, self.draft_cost = Budget(survival), cost

    def window(self) -> int:
        """The most that may be drafted; 0 where not even one token pays."""
        pays = self._pays([[] for _ in self.rows], [True] * len(self.rows))
        return super().window() if self.draft_cost.asked(pays, LOOK_AGAIN) else 0

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        goes_on = self._pays(self.seen, [n > step + 1 for n in lengths])
        return lengths if goes_on else [min(n, step + 1) for n in lengths]

    def _pays(self, seen: list[list[float]], open: list[bool]) -> bool:
        """Whether another step does."""
        cost, step = self.context.cost, self.draft_cost.step
        if step is None or not cost.known:
            return max(map(len, seen)) < UNMEASURED
        return self.budget.pays(seen, open, cost.round(len(seen)), step, self.context.lockstep)

    def observe(self, verdict: Verdict) -> None:
        for seen, drafted, accepted in zip(self.seen, verdict.drafted, verdict.accepted, strict=bool(self.seen)):
            self.budget.observe(seen[:drafted], accepted)
        self.seen = []
        super().observe(verdict)

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.budget.alpha)
