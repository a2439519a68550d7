"""The window by itself, and whether rows run overlapped or one after the other."""

from dataclasses import dataclass
from typing import Literal

from ...budget.cost import running_mean
from ..draft_model.window import WindowTuner
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
        self.tuners: dict[int, WindowTuner] = {}
        self.forking_seconds: dict[int, float] = {}
        """of a draft step that drafts for corrections as well, per batch size"""
        self.history = History()
        self.rounds = 0

    def _tuner(self, rows: int) -> WindowTuner:
        return self.tuners.setdefault(rows, WindowTuner())

    def saw_draft(self, rows: int, seconds: float, forking: bool = False) -> None:
        if forking:
            self.forking_seconds[rows] = running_mean(self.forking_seconds.get(rows), seconds)
        else:
            self._tuner(rows).observe_draft(seconds)

    def saw_target(self, rows: int, width: int, seconds: float) -> None:
        self._tuner(rows).observe_verify(width, seconds)

    def plan(self, rows: int) -> Plan:
        """The fastest way to run the next round."""
        self.rounds += 1
        runs = self.history.runs
        choices = [1, 0] if self.corrections == "auto" else [self.corrections]
        best, *others = sorted((self._overlapped(rows, n, runs) for n in choices), key=lambda choice: -choice[0])
        look_again = self.rounds % LOOK_AGAIN == 0
        tuner = self._tuner(rows)
        if self.window == "auto" and self.pre_verify and self.post_verify and tuner.draft_seconds and best[0]:
            windows = range(self.largest + 1)
            speeds = serial_speeds(runs, windows, tuner.verify_time(), tuner.draft_seconds)
            serial = max(windows, key=speeds.__getitem__)
            if serial and speeds[serial] > best[0]:
                return best[1] if look_again else Plan(serial, pre_verify=False, post_verify=False, corrections=0)
        return others[0][1] if others and look_again else best[1]

    def _overlapped(self, rows: int, corrections: int, runs: Runs) -> tuple[float, Plan]:
        """Tokens per second of the overlapped schedule (0 where nothing was measured yet), and the plan for it."""
        tuner, forking = self._tuner(rows), self.forking_seconds.get(rows)
        draft = (forking or tuner.draft_seconds) if corrections else (tuner.draft_seconds or forking)
        window, speed = tuner.window if self.window == "auto" else self.window, 0.0
        if draft and tuner.verify_seconds:
            verify_time = tuner.verify_time()
            if self.window == "auto":
                window = min(self.largest, max(1, round(verify_time(1) / draft)))
                window = min(self.largest, max(1, round(verify_time(window) / draft)))
            share = self.history.foreseen if corrections else 0.0
            speed = overlapped_speed(runs, window, verify_time(window), draft, share)
        return speed, Plan(window, self.pre_verify, self.post_verify, corrections)
