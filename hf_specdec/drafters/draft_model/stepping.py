"""`SteppingSession`: a draft model that draws token by token, as long as the next one promises to pay."""

from typing import TYPE_CHECKING

from torch import Tensor

from ...budget import DraftCost, Stepwise, Survival
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...transfer import to_host
from .session import DraftModelSession
from .window import LARGEST, why_rested

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNMEASURED = 4
"""tokens of a round before anything was measured"""


class Stepping(DraftModelSession):
    """Drafts on while that promises most tokens per second for the whole batch, or not at all, by what is said of each
    token that is there."""

    weighs = True
    stepwise: Stepwise
    seen: list[list[float]]
    """[B] what was said of the round's tokens"""

    def window(self) -> int:
        """The most that may be drafted; 0 where not even one token pays."""
        if self.context.cost.tried(len(self.rows)) == 0:
            return 0
        pays = self._pays([[] for _ in self.rows], [True] * len(self.rows))
        return int(self.fixed_window) if self.draft_cost.asked(pays, self.context.cost, len(self.rows)) else 0

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        """[B] tokens that rows draft in all, of which `step + 1` are there, and something was said of them."""
        goes_on = self._pays(self.seen, [n > step + 1 for n in lengths])
        return lengths if goes_on else [min(n, step + 1) for n in lengths]

    def _pays(self, seen: list[list[float]], open: list[bool]) -> bool:
        """Whether another step does."""
        cost, step = self.context.cost, self.draft_cost.step
        if step is None or not cost.known:
            return max(map(len, seen)) < UNMEASURED
        return self.stepwise.pays(seen, open, cost.round(len(seen)), step, self.context.lockstep)

    def observe(self, verdict: Verdict) -> None:
        for seen, drafted, accepted in zip(self.seen, verdict.drafted, verdict.accepted, strict=bool(self.seen)):
            self.stepwise.observe(seen[:drafted], accepted)
        self.seen = []
        super().observe(verdict)

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.stepwise.alpha)


class SteppingSession(Stepping):
    """What is said of a token is the chance that it was drawn with."""

    def __init__(self, context: DraftContext, model: "PreTrainedModel", survival: Survival, cost: DraftCost) -> None:
        """
        Args:
            survival: how often draws were right, by the chances that they were drawn with.
            cost: of this model's steps.
        """
        super().__init__(context, model, LARGEST, cost=cost)
        self.stepwise, self.seen = Stepwise(survival), []

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.seen = [[] for _ in budget]
        return super().propose(sequences, budget)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, q: Tensor | None, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        assert q is not None  # drawn
        drawn, chances = to_host(tokens), to_host(q.gather(1, tokens[:, None])[:, 0])
        for b, chance in enumerate(chances):
            if lengths[b] > step:
                self.seen[b].append(chance)
        return self.stopped(step, self.until_eos(step, drawn, lengths))
