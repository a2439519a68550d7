"""The window by itself, and whether rows run overlapped or one after the other."""

from dataclasses import dataclass
from typing import Literal

from ...budget import Cost
from ...budget.cost import running_mean
from ..draft_model.window import FIRST
from .history import History, Runs, overlapped_speed, serial_speeds

LOOK_AGAIN = 32
"""rounds after which what seems slower is tried once more"""


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

    @property
    def serial(self) -> bool:
        """Whether the models wait for each other."""
        return not (self.pre_verify or self.post_verify)


class Planner:
    """Chooses what is measured to be fastest for each batch size, following it as it drifts: γ = T_target / T_draft
    (Theorem 1), whether corrections are drafted for, and the serial schedule at its best window."""

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
        self.cost = Cost()
        """of the target's forwards beside a worker"""
        self.steps: dict[tuple[int, bool], float] = {}
        """seconds of a draft step per batch size, and whether it drafted for corrections, too"""
        self.history = History()
        self.rounds = 0
        self.resting = False
        """whether most rounds of the last call went without a draft, as that did not pay"""

    def saw_draft(self, rows: int, seconds: float, forking: bool = False) -> None:
        self.steps[rows, forking] = running_mean(self.steps.get((rows, forking)), seconds)

    def saw_target(self, rows: int, width: int, seconds: float) -> None:
        self.cost.observe_forward(rows, width, seconds)

    def plan(self, rows: int) -> Plan:
        """The fastest way to run the next round."""
        self.rounds += 1
        runs = self.history.runs
        choices = [1, 0] if self.corrections == "auto" else [self.corrections]
        best, *others = sorted((self._asked_for(rows, n, runs) for n in choices), key=lambda plan: -plan.speed)
        look_again = self.rounds % LOOK_AGAIN == 0
        step = self.steps.get((rows, False))
        if self.window == "auto" and self.pre_verify and self.post_verify and step and best.speed:
            windows = range(self.largest + 1)
            speeds = serial_speeds(runs, windows, self.cost.round(rows), step)
            serial = max(windows, key=speeds.__getitem__)
            if serial and speeds[serial] > best.speed:
                return best if look_again else Plan(serial, False, False, corrections=0, speed=speeds[serial])
        return others[0] if others and look_again else best

    def _asked_for(self, rows: int, corrections: int, runs: Runs) -> Plan:
        """The schedule that was asked for."""
        forking = corrections > 0
        draft = self.steps.get((rows, forking)) or self.steps.get((rows, not forking))
        window, speed = FIRST if self.window == "auto" else self.window, 0.0
        if draft and self.cost.known:
            verify_time = self.cost.round(rows)
            if self.window == "auto":
                window = min(self.largest, max(1, round(verify_time(1) / draft)))
                window = min(self.largest, max(1, round(verify_time(window) / draft)))
            share = self.history.foreseen if corrections else 0.0
            if self.pre_verify or self.post_verify:
                speed = overlapped_speed(runs, window, verify_time(window), draft, share)
            else:
                (speed,) = serial_speeds(runs, [window], verify_time, draft)
        return Plan(window, self.pre_verify, self.post_verify, corrections, speed)
