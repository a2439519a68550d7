"""`SteppedSession`: a draft model that is asked after each token whether to draw another one, by what is said of those
that are there; and `BudgetedSession`, which asks what pays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ...budget import Acceptance, DraftCost, Rest, Stepwise, why_rested
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...transfer import to_host
from .growing import UNMEASURED
from .session import DraftModelSession, tested
from .translating import Translated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Estimate(Protocol):
    """What speaks for a token that was drawn, from 0 to 1."""

    def begin(self, sequences: Sequences) -> None:
        """A round begins, behind these rows."""

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[list[float], list[int]]:
        """Of a round's next tokens [B], and these tokens, from the logits [B, V] and the distribution q [B, V] that
        they were drawn from; None where they are the likeliest ones."""


class Own:
    """The chance that the draft itself gave a draw."""

    def begin(self, sequences: Sequences) -> None:
        """It goes by the draw alone."""

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[list[float], list[int]]:
        assert q is not None, "of what is not drawn"
        return to_host(q.gather(1, tokens[:, None])[:, 0]), to_host(tokens)


class SteppedSession(DraftModelSession):
    """Drafts with a model until it is told to stop.

    It is asked after token i about token i + 1: known are q up to position i and the tokens there, and token i is
    verified either way. Which positions are verified never depends on the token drawn there, so the output keeps the
    target's distribution; and asking before the forward at i + 1 saves that forward, too.
    """

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        longest: int,
        estimate: Estimate,
        cost: DraftCost | None = None,
    ) -> None:
        """
        Args:
            longest: tokens of a round at most.
            estimate: of the tokens that are drawn.
            cost: of this draft's steps, its estimates among them.
        """
        super().__init__(context, model, longest, cost=cost)
        self.estimate = estimate
        self.seen: list[list[float]] = []
        """[B] what was said of each token of the round"""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.seen = [[] for _ in budget]
        self.estimate.begin(sequences)
        return super().propose(sequences, budget)

    def shortened(self, step: int, logits: Tensor, tokens: Tensor, q: Tensor | None, lengths: list[int]) -> list[int]:
        said, drawn = self.estimate.of(logits, tokens, q)
        for b, chance in enumerate(said):
            if lengths[b] > step:
                self.seen[b].append(chance)
        return self.stopped(step, self.until_eos(step, drawn, lengths))

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        """[B] tokens that rows draft in all, of which `step + 1` are there, and something is said of them."""
        return lengths


class BudgetedSession(SteppedSession):
    """Draws on while that promises most tokens per second for the whole batch, or not at all."""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        longest: int,
        estimate: Estimate,
        cost: DraftCost,
        acceptance: Acceptance,
    ) -> None:
        """
        Args:
            acceptance: how often drafts were right, by what was said of them.
        """
        super().__init__(context, model, longest, estimate, cost)
        self.stepwise, self._rest = Stepwise(acceptance), Rest(cost)
        self._active: list[int] = []
        """rows that may draft; others of a lockstep batch are finished"""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self._active = [b for b, room in enumerate(budget) if room > 0]
        return super().propose(sequences, budget)

    def window(self) -> int:
        """The most that may be drafted; 0 where not even one token pays."""
        cost, rows, self.price = self.context.cost, len(self.rows), 0.0
        if self._rest.goes_on(self.rows) or cost.tried(rows) == 0:
            return 0
        price = self.draft_cost.asked(self._pays([[]] * rows, [True] * rows), cost, rows, steps=1)
        if price is None:
            self._rest.begin(self.rows)
            return 0
        self.price = price
        return super().window()

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        open = [n > step + 1 for n in lengths]
        return lengths if not any(open) or self._pays(self.seen, open) else [min(n, step + 1) for n in lengths]

    def _pays(self, seen: Sequence[list[float]], open: list[bool]) -> bool:
        """Whether another step does."""
        cost, step, opening = self.context.cost, self.draft_cost.step, self.draft_cost.opening
        if step is None or not cost.known:
            return max(map(len, seen)) < min(UNMEASURED, cost.tried(len(seen)) or UNMEASURED)
        seconds, advance = cost.round(len(seen)), self.context.advance
        mine, on = [seen[b] for b in self._active], [open[b] for b in self._active]
        return self.stepwise.pays(mine, on, seconds, step, advance, opening)

    def observe(self, verdict: Verdict) -> None:
        told = zip(self.seen, tested(verdict), verdict.accepted, strict=bool(self.seen))
        for seen, count, accepted in told:
            self.stepwise.observe(seen[:count], accepted)
        self.seen = []
        super().observe(verdict)

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.stepwise.alpha)
