"""The window by itself, and whether rows run overlapped or one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...budget import Cost, cost
from .history import History, Runs, overlapped_speeds, serial_speeds

FIRST = 5
"""γ before anything was measured"""
LOOK_AGAIN, SELDOM = 32, 256
"""rounds after which what seems slower is tried once more; as many as have passed until then, up to so many"""
FAVOUR = 1.03
"""times as fast as measured, what drafts for corrections is taken for: a step's time is not known that well, and how
many are foreseen is not seen where nobody drafts for them"""


@dataclass(frozen=True)
class Plan:
    """How to run a round."""

    window: int
    """γ"""
    pre_verify: bool
    """whether the target checks a row's first draft token while drafting goes on"""
    post_verify: bool
    """whether drafting goes on while the target checks a row's draft"""
    corrections: int
    """for each token that is being checked, how many corrections are drafted for"""
    speed: float = 0.0
    """tokens per second that a row is promised; 0 where nothing was measured yet"""


class Times:
    """What the two models take, side by side or each alone: on cores that they share these are not the same."""

    def __init__(self) -> None:
        self.target = Cost()
        self.steps: dict[tuple[int, bool], cost.Times] = {}
        """seconds of a draft step per batch size, and whether it drafted for corrections, too"""

    def saw_step(self, rows: int, forking: bool, seconds: float) -> None:
        self.steps[rows, forking] = self.steps.get((rows, forking), cost.Times()).add(seconds)

    def step(self, rows: int, forking: bool = False) -> float | None:
        """Seconds of a draft step, or of the most similar one that was seen."""
        nearest = min(self.steps, key=lambda known: (abs(known[0] - rows), known[1] != forking), default=None)
        return None if nearest is None else self.steps[nearest].seconds


class Planner:
    """Chooses what is measured to be fastest for each batch size, following it as it drifts: γ (T_target / T_draft by
    Theorem 1, where neither takes longer than it should), whether corrections are drafted for (unless that
    loses more than `FAVOUR`), and the serial schedule at its best window."""

    def __init__(
        self,
        window: int | Literal["auto"],
        pre_verify: bool,
        post_verify: bool,
        corrections: int | Literal["auto"] = 0,
        largest: int = 24,
    ) -> None:
        """
        Args:
            window: a fixed γ, or "auto" to choose between it and the serial schedule.
            corrections: how many to draft for, or "auto" for one where it pays.
        """
        self.window, self.corrections = window, corrections
        self.pre_verify, self.post_verify, self.largest = pre_verify, post_verify, largest
        self.beside, self.alone = Times(), Times()
        self.history = History()
        self.rounds, self.look_at = 0, LOOK_AGAIN
        self.resting = False
        """whether most rounds of the last call went without a draft, as that did not pay"""

    def saw_draft(self, rows: int, seconds: float, forking: bool = False, alone: bool = False) -> None:
        (self.alone if alone else self.beside).saw_step(rows, forking, seconds)

    def saw_target(self, rows: int, width: int, seconds: float, alone: bool = False) -> None:
        (self.alone if alone else self.beside).target.observe_forward(rows, width, seconds)

    def one_after_the_other(self, rows: int) -> tuple[Callable[[int], float], float]:
        """Seconds of a target forward by its width, and of a draft step, with nothing beside them; once a plan has a
        speed. What was not seen alone is as it was side by side; a step, as much faster as the target is. No step takes
        longer alone."""
        alone, beside = self.alone.step(rows), self.beside.step(rows)
        verify = (self.alone if self.alone.target.known else self.beside).target.round(rows)
        if alone is None:
            return verify, (beside or 0.0) * min(1.0, verify(1) / self.beside.target.round(rows)(1))
        return verify, alone if beside is None else min(alone, beside)

    def plan(self, rows: int) -> Plan:
        """The fastest way to run the next round."""
        self.rounds += 1
        runs = self.history.runs
        choices = [1, 0] if self.corrections == "auto" else [self.corrections]
        plans = [self._asked_for(rows, n, runs) for n in choices]
        best, *others = sorted(plans, key=lambda plan: -plan.speed * (FAVOUR if plan.corrections else 1.0))
        if look_again := self.rounds >= self.look_at:
            self.look_at += min(self.rounds, SELDOM)
        if self.window == "auto" and self.pre_verify and self.post_verify and best.speed:
            speed, serial = self._fastest(serial_speeds, runs, *self.one_after_the_other(rows))
            if speed > max(plan.speed for plan in plans):
                return best if look_again else Plan(serial, False, False, corrections=0, speed=speed)
        return others[0] if others and look_again else best

    def _asked_for(self, rows: int, corrections: int, runs: Runs) -> Plan:
        """The schedule that was asked for; one without pre-verify or post-verify has the other's window, too."""
        overlapped = self.pre_verify or self.post_verify
        times = self.beside if overlapped else self.alone
        draft = times.step(rows, corrections > 0)
        window, speed = FIRST if self.window == "auto" else self.window, 0.0
        if draft and times.target.known:
            share = self.history.foreseen if corrections else 0.0
            speeds = partial(overlapped_speeds, foreseen=share) if overlapped else serial_speeds
            speed, window = self._fastest(speeds, runs, times.target.round(rows), draft)
        return Plan(window, self.pre_verify, self.post_verify, corrections, speed)

    def _fastest(
        self, speeds: Callable[..., list[float]], runs: Runs, verify: Callable[[int], float], draft: float
    ) -> tuple[float, int]:
        """The highest speed and its window, of those that may be chosen; whether to draft at all is not asked here."""
        windows = range(1, self.largest + 1) if self.window == "auto" else [self.window]
        speed, window = max(zip(speeds(runs, windows, verify, draft), (-gamma for gamma in windows), strict=True))
        return speed, -window
