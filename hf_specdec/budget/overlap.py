"""`Overlap`: how far a draft model drafts that works while the target verifies, and whether the two should rather take
turns (Liu et al. 2024, Theorem 1, with measured times and acceptance)."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..theory import pearl_tokens_per_second, tokens_per_second
from .acceptance import Acceptance
from .account import Account
from .controller import DRAFTED, GUESS, UNMEASURED
from .cost import Cost, Times
from .decision import WORTH_IT
from .evidence import Evidence

LARGEST = 24
"""γ at most, where it is chosen"""
UNBROKEN, BROKEN = Evidence.of(DRAFTED), Evidence.of("drafted behind a rejected token")
CORRECTIONS = (1, 4, 0)
"""for each token that is being verified, how many are drafted for, where that is chosen"""


class Plan(NamedTuple):
    """How to run a round."""

    window: int
    """γ"""
    pre_verify: bool
    """whether the target checks a row's first draft token while drafting goes on"""
    post_verify: bool
    """whether drafting goes on while the target checks a row's draft"""
    corrections: int
    """for each token that is being verified, how many corrections are drafted for"""
    speed: float = 0.0
    """tokens per second that a row is promised; 0 where nothing was measured yet"""

    @property
    def overlapped(self) -> bool:
        """Whether the draft model works while the target does; else they take turns."""
        return self.pre_verify or self.post_verify


class Overlap:
    """Plans rounds of a draft model that can work beside its target. Observes what both take, side by side and alone:
    on cores that they share these are not the same. The fastest plan is taken; the account pays for tries of another.
    """

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        corrections: int | Literal["auto"] = 0,
        pre_verify: bool = True,
        post_verify: bool = True,
    ) -> None:
        """
        Args:
            window: γ that the user has set; "auto" chooses from 1 to `LARGEST`, and turns where those are faster.
            corrections: how many to draft for; "auto" is what pays of `CORRECTIONS`.
            pre_verify, post_verify: as in `Plan`, where both work at the same time.
        """
        self.window = window
        self.windows = range(1, LARGEST + 1) if window == "auto" else [window]
        self.first = UNMEASURED if window == "auto" else window
        self.choices = CORRECTIONS if corrections == "auto" else (corrections,)
        self.strategies = pre_verify, post_verify
        self.turns = not any(self.strategies) or (window == "auto" and all(self.strategies))
        """whether they may take turns"""
        self.acceptance, self.account = Acceptance(), Account()
        self.beside, self.alone = Cost(), Cost()
        """of the target while the draft model works, and by itself"""
        self.steps: dict[tuple[bool, int], Times] = {}
        """of the draft model, by whether it works beside the target, and how many corrections it drafts for, too"""
        self.tries = 0
        """rounds with another plan than the fastest; the others take turns"""
        self.resting = False
        """whether drafting was paused in most rounds of the last call"""

    # ------------------------------------------------------------------ plan

    def plan(self, rows: int) -> Plan:
        """The next round's, for so many rows."""
        plans = [self._beside(rows, n) for n in self.choices] if any(self.strategies) else []
        if self.turns and (not plans or plans[0].speed):
            plans.append(self._in_turns(rows))
        best = max(plans, key=lambda plan: plan.speed * (WORTH_IT if plan.corrections else 1.0))
        others = [plan for plan in plans if plan is not best]
        self.account.wait()
        if not others or not best.speed or self.account.missing(1.0):
            return best
        self.account.charge(1.0)  # more than that the round is not going to lose
        self.tries += 1
        return others[self.tries % len(others)]

    def _beside(self, rows: int, corrections: int) -> Plan:
        step = self._step(True, corrections)
        if not step or not self.beside.known:
            return Plan(self.first, *self.strategies, corrections)
        alpha, broken, seconds = self.alpha(), self.alpha(broken=True), self.beside.round(rows)
        foreseen = self.acceptance.chance(_foreseen(corrections), GUESS) if corrections else 0.0

        def speed(gamma: int) -> float:
            return pearl_tokens_per_second(alpha, gamma, seconds(gamma), step, foreseen, first=broken)

        window = max(self.windows, key=speed)
        return Plan(window, *self.strategies, corrections, speed(window))

    def _in_turns(self, rows: int) -> Plan:
        cost, step = self.alone if self.alone.known else self.beside, self._step(False)
        if not step or not cost.known:
            return Plan(self.first, False, False, 0)
        alpha, broken, seconds = self.alpha(), self.alpha(broken=True), cost.round(rows)

        def speed(gamma: int) -> float:
            whole, after = alpha**gamma, broken * alpha ** (gamma - 1)  # the chance that all is accepted
            share = after / (1 - whole + after)  # of rounds behind one that was accepted as a whole
            first = share * alpha + (1 - share) * broken
            return tokens_per_second(alpha, gamma, seconds, step, first=first)

        window = max(self.windows, key=speed)
        return Plan(window, False, False, 0, speed(window))

    def alpha(self, broken: bool = False) -> float:
        """α, how often a tested token was accepted: behind an accepted one, or behind a rejected one (`broken`).
        Accepted tokens come in runs."""
        return self.acceptance.chance(BROKEN if broken else UNBROKEN, GUESS)

    def _step(self, beside: bool, corrections: int = 0) -> float | None:
        """Seconds of a draft step, or of the most similar kind that was seen."""
        kinds = sorted(self.steps, key=lambda kind: (kind[0] != beside, abs(kind[1] - corrections)))
        return self.steps[kinds[0]].seconds if kinds else None

    # ------------------------------------------------------------------ observe

    def pads_to(self, widths: Sequence[int]) -> None:
        """As `Cost.pads_to`."""
        for cost in (self.beside, self.alone):
            cost.pads_to(widths)

    def observe_step(self, seconds: float, beside: bool = True, corrections: int = 0) -> None:
        """What a draft step took, in which so many corrections were drafted for."""
        kind = beside, corrections
        self.steps[kind] = self.steps.get(kind, Times()).add(seconds)

    def observe_forward(self, rows: int, width: int, seconds: float, beside: bool = True) -> None:
        """What a forward of the target took, of `width` tokens per row."""
        (self.beside if beside else self.alone).observe_forward(rows, width, seconds)

    def observe_tests(self, tested: int, accepted: int, broken: bool) -> None:
        """Of a row's tested tokens so many leading ones were accepted.

        Args:
            broken: whether the row's last test rejected a token.
        """
        for place in range(min(tested, accepted + 1)):
            self.acceptance.observe(BROKEN if broken and not place else UNBROKEN, place < accepted)

    def observe_corrections(self, made: int, foreseen: int, corrections: int = 1) -> None:
        """What became of drafting for so many corrections: how many were made, and foreseen."""
        for place in range(made):
            self.acceptance.observe(_foreseen(corrections), place < foreseen)


def _foreseen(corrections: int) -> Evidence:
    """Of corrections, where so many are drafted for."""
    return Evidence.of("foreseen", corrections)
