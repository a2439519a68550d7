"""`Controller`: how far a draft model drafts, decided for one call by what its target's calls have taught."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .acceptance import Acceptance, Evidence
from .account import Account
from .cost import KEPT, CostView, DraftCost
from .decision import LONGEST, Advance, steps_that_pay

DRAFTED = "drafted"
"""the draft model as a source of tokens; it goes on from its candidate of rank 0"""
GUESS = 0.6
"""how often a candidate is right where those before it are wrong, before anything was tested"""
LOOK = 2
"""steps of a try: two show whether accepted tokens come in runs"""
UNMEASURED = 4
"""steps of a round before their times are known"""


class Context(Protocol):
    """What it knows of a call: `DraftContext`."""

    cost: CostView
    lockstep: bool

    @property
    def advance(self) -> Advance: ...

    @property
    def rows(self) -> int: ...


class Outcome(Protocol):
    """What it is told of a round: `Verdict`."""

    rows: list[int]
    drafted: list[int]
    accepted: list[int]
    tokens: list[list[int]]
    paths: list[list[int]]


class Experience:
    """What calls have taught of a draft model that drafts for one target."""

    def __init__(self) -> None:
        self.acceptance, self.cost, self.account = Acceptance(), DraftCost(), Account()


@dataclass
class Drafted:
    """What stands in a round's drafts before the draft model's next step."""

    rows: Sequence[int]
    """[B] of the forward, by their index in the call"""
    chances: Sequence[Sequence[float]]
    """[A][any] of each row that may draft, its nodes' chances to be kept, the likeliest first"""
    onward: Sequence[float]
    """[A] the chance to get to the next step's place, and that nobody says yet what is right there; 0 for a row that
    drafts no more"""
    steps: int = 0
    """that were made already"""
    unread: int = 0
    """tokens that the draft model has to read before its first step"""
    left: int = 1
    """tokens to go, for which it has read them"""


class Controller:
    """Asked before each round how many steps of the draft model to make, and after each step whether to make another.

    Steps that promise more tokens per second are free. Where none does, the account pays for tries.
    """

    def __init__(
        self,
        context: Context,
        experience: Experience,
        fixed: int | None = None,
        candidates: int = 1,
        alone: bool = True,
        longest: int = LONGEST,
        who: str = "the draft model",
    ) -> None:
        """
        Args:
            fixed: γ that the user has set, steps of every round in which the draft model is asked.
            candidates: k, tokens that a step gives to verify.
            alone: whether nobody else drafts; then the user's γ is drafted in every round.
            longest: steps of a round at most, where γ is not set.
            who: drafts, for notes.
        """
        self.context, self.acceptance = context, experience.acceptance
        self.cost, self.account = experience.cost, experience.account
        self.fixed, self.candidates, self.alone, self.longest = fixed, candidates, alone, fixed or longest
        self.who = who
        self.rounds = self.declined = 0
        """all, and those in which nothing was drafted because nothing promised to pay"""
        self._declines = False
        self._price = 0.0
        """plain rounds that this round's try takes beside its own; 0 where it is none"""
        self._rests: tuple[Sequence[int], int] = [], 0
        """rows of which it is known that drafting does not pay, and for how many more rounds that is believed: to find
        it out takes a part of a round, but after `KEPT` rounds the times are new"""

    # ------------------------------------------------------------------ plan

    def plan(self, drafted: Drafted, most: int, enough: int = 1) -> int:
        """Steps that the draft model makes in this round at least; 0 where it is not asked.

        Args:
            most: steps that there is room for.
            enough: no more are counted; 1 where it is asked again after each step.
        """
        self.rounds, self._declines, self._price = self.rounds + 1, False, 0.0
        rows, left = self._rests
        if most < 1 or (self.fixed is not None and self.alone):
            return max(0, min(self.fixed or 0, most))
        if self.fixed is None and self.context.cost.tried(len(drafted.rows)) == 0:
            return 0  # nothing will be verified
        alone = self.fixed is None and not any(drafted.chances)  # what others propose is another matter
        if alone and left and list(rows) == list(drafted.rows):
            self._rests = rows, left - 1
            self.account.wait()
            self._declines = True
            return 0
        if steps := self._steps_that_pay(drafted, enough):
            return min(self.fixed or steps, most)
        self.account.wait()
        price = self._price_of_try(drafted)
        if away := self.account.missing(price):
            self._rests, self._declines = (list(drafted.rows), min(away - 1, KEPT) if alone else 0), True
            return 0
        self._price = price
        return min(self.fixed or LOOK, most)

    def goes_on(self, drafted: Drafted) -> bool:
        """Whether to make another step behind those of this round."""
        if self.fixed is not None or (self._price and drafted.steps < LOOK):
            return drafted.steps < (self.fixed or LOOK)
        return drafted.steps < self.longest and self._steps_that_pay(drafted, enough=1) > 0

    def alpha(self, rank: int = 0) -> float:
        """α, how often the draft model's candidate of this rank is right where all before it is."""
        return self.acceptance.chance(Evidence.of(DRAFTED, rank), GUESS * (1 - GUESS) ** rank)

    def _steps_that_pay(self, drafted: Drafted, enough: int) -> int:
        cost, step, made, rows = self.context.cost, self.cost.step, drafted.steps, len(drafted.rows)
        if step is None or not cost.known:
            wide = cost.tried(rows) or UNMEASURED
            return max(0, min(UNMEASURED, max(LOOK, wide)) - made)
        alphas = [self.alpha(rank) for rank in range(self.candidates)]
        reading = self.cost.reading * drafted.unread / max(drafted.left, 1)  # of the prompt serves the rest of the text
        opening = self.cost.opening + (0.0 if made else reading)

        def drafting(more: int) -> float:
            return opening + (made + more) * step if made + more else 0.0

        chances, onward, advance = drafted.chances, drafted.onward, self.context.advance
        return steps_that_pay(chances, onward, alphas, cost.round(rows), drafting, advance, min(enough, self.longest))

    def _price_of_try(self, drafted: Drafted) -> float:
        """Plain rounds that a try takes beside its own."""
        seconds, steps = self.context.cost.round(len(drafted.rows)), self.fixed or LOOK
        drafting = self.cost.opening + steps * (self.cost.step or 0.0) + self.cost.reading * drafted.unread
        return max((seconds(1 + steps * self.candidates) + drafting) / seconds(1) - 1, 0.0) or 1e-9

    # ------------------------------------------------------------------ observe

    def observe(self, kept: Sequence[int], verdict: Outcome) -> None:
        """What became of a round.

        Args:
            kept: [B] accepted tokens of the draft model's, that nobody else had proposed.
        """
        self.declined += self._declines and not any(verdict.drafted)
        if self._price:
            context = self.context
            each = min(kept) if context.lockstep else sum(kept) / (len(kept) + context.cost.beside)
            gained = context.advance.tokens([1 + each] * len(kept)) / len(kept) - 1
            self.account.charge(self._price - gained)
        self._declines, self._price = False, 0.0

    def observe_chains(self, verdict: Outcome, kept: Sequence[int] | None = None) -> None:
        """What became of the draft model's chains: of each position's candidates, the nodes of a row, it went on from
        the first.

        Args:
            kept: as in `observe`; None where nobody else drafted.
        """
        k, paths = self.candidates, verdict.paths or [[]] * len(verdict.rows)
        for drafted, accepted, text, path in zip(verdict.drafted, verdict.accepted, verdict.tokens, paths, strict=True):
            for depth in range(min(drafted, len(text))):
                right = (path[depth] % k if k > 1 else 0) if depth < accepted else None
                for rank in range(k):
                    self.acceptance.observe(Evidence.of(DRAFTED, rank), rank == right)
                if right != 0:
                    break
        self.observe(verdict.accepted if kept is None else kept, verdict)

    def notes(self) -> list[str]:
        """How often drafting was left out, and why; nothing where it was not, or where it cannot be said."""
        c = self.cost.c(self.context.cost, self.context.rows)
        if not self.declined or c is None:
            return []
        return [
            f"{self.who} was not used in {self.declined} of {self.rounds} rounds, because it would have cost more "
            f"than it gained: a draft begins at {c:.2g} of a target step, and the expected acceptance rate is "
            f"{self.alpha():.0%}"
        ]
