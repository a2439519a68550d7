"""γ by itself: the window that yields most tokens per second, from what was measured in this run."""

from collections.abc import Callable

from ...budget.cost import running_mean
from ...theory import best_window, line_through

LOOK_AGAIN = 12
"""rounds after which the draft model is asked again where it has not paid"""


class WindowTuner:
    """Chooses γ to maximise E(γ) / (T(γ + 1) + γ · T_draft), or what `theory.tokens_per_second` makes of candidates.

    α and the times are running means that forget, so γ follows the text. Verification times of widths that have not
    been seen lie on the line through those that have. Theorem 3.8 is the special case T(γ + 1) = T(1).
    """

    def __init__(self, start: int = 5, largest: int = 16, memory: float = 0.98) -> None:
        self.window, self.largest, self.memory = start, largest, memory
        # A prior of a few tokens keeps the first rounds from jumping to conclusions.
        self.accepted, self.tested = 3.0, 4.0
        self.rescued, self.missed = 1.0, 3.0
        """drafted tokens that were wrong beside another candidate that was right, and all that were wrong"""
        self.draft_seconds: float | None = None
        self.verify_seconds: dict[int, float] = {}
        self.rounds = 0

    @property
    def alpha(self) -> float:
        """How often a drafted token was right."""
        return self.accepted / self.tested

    @property
    def rescue(self) -> float:
        """How often another candidate was right where a drafted token was wrong."""
        return self.rescued / self.missed

    def observe_draft(self, seconds: float) -> None:
        """One draft step took this long."""
        self.draft_seconds = running_mean(self.draft_seconds, seconds)

    def observe_verify(self, width: int, seconds: float) -> None:
        """A verification forward of `width` tokens per row took this long."""
        self.verify_seconds[width] = running_mean(self.verify_seconds.get(width), seconds)

    def observe_acceptance(self, drafted: list[int], accepted: list[int]) -> None:
        """Per row, of so many drafted tokens so many leading ones were accepted."""
        self.accepted = self.memory * self.accepted + sum(accepted)
        self.tested = self.memory * self.tested + sum(n + (n < k) for k, n in zip(drafted, accepted, strict=True))

    def observe_candidates(self, rescued: list[bool]) -> None:
        """Per drafted token that was wrong, whether another candidate was right."""
        self.rescued = self.memory * self.rescued + sum(rescued)
        self.missed = self.memory * self.missed + len(rescued)

    def choose(self, candidates: int = 1, seconds: Callable[[int], float] | None = None) -> int:
        """γ for the next round; 0 where drafting does not pay.

        Args:
            seconds: T by the width of a forward, where all that draft for the target have measured it together.
        """
        self.rounds += 1
        if self.draft_seconds is None or not self.verify_seconds:
            return self.window
        rescue, seconds = self.rescue if candidates > 1 else 0.0, seconds or self.verify_time()
        best = best_window(self.alpha, seconds, self.draft_seconds, self.largest, candidates, rescue)
        if best == 0 and self.rounds % LOOK_AGAIN == 0:
            return 1
        self.window = best
        return best

    def verify_time(self) -> Callable[[int], float]:
        """T(width) in seconds, from the measured widths."""
        return line_through(dict(self.verify_seconds))  # a copy: another call may add to it meanwhile

    def c(self) -> float | None:
        """A draft step over a target step; None where one of them was not measured yet."""
        known = self.draft_seconds is not None and self.verify_seconds
        return self.draft_seconds / self.verify_time()(1) if known else None  # type: ignore[operator]


def why_rested(rested: int, rounds: int, c: float | None, alpha: float) -> list[str]:
    """How often drafting was left out, and why; nothing where it was not, or where it cannot be said."""
    if not rested or c is None:
        return []
    return [
        f"drafting was stopped in {rested} of {rounds} rounds, as it would have cost more than it gained: a draft step "
        f"costs {c:.2g} of a target step, the draft is right {alpha:.0%} of the time"
    ]
