"""The window by itself, and whether rows run overlapped or one after the other."""

from dataclasses import dataclass

from ...theory import best_window, tokens_per_second
from ..draft_model.window import WindowTuner

FORESEEN = (2.0, 4.0)
"""of so many corrections so many are taken to have been drafted for, until some were seen"""


@dataclass(frozen=True)
class Plan:
    """How to run a round."""

    window: int
    """γ"""
    pre_verify: bool
    """whether the target checks a row's first draft token while drafting goes on"""
    post_verify: bool
    """whether drafting goes on while the target checks a row's draft"""


def pearl_tokens_per_second(alpha: float, gamma: int, target: float, draft: float, foreseen: float = 0.0) -> float:
    """Speed of Figure 3's schedule without overhead, for acceptances that are independent.

    A row is either before its first accepted token (the target tests x1) or behind it (γ tests, x2 … x(γ+1)). A round
    that accepts all waits for the drafting of γ tokens, one that rejects does not.

    Args:
        target: seconds of a target forward.
        draft: seconds of a draft step.
        foreseen: share of corrections that were drafted for.
    """
    passed = alpha**gamma
    post_tokens = sum(alpha**i for i in range(gamma))
    # The share of rounds of each kind, from the chain that moves between them.
    on_from_pre, on_from_post = (p + (1 - p) * foreseen for p in (alpha, passed))
    pre, post = 1 - on_from_post, on_from_pre
    whole, short = max(target, gamma * draft), max(target, draft)
    seconds = sum(share * (on * whole + (1 - on) * short) for share, on in ((pre, on_from_pre), (post, on_from_post)))
    tokens = pre + post * post_tokens
    return tokens / seconds if tokens else 1 / whole


class Planner:
    """Chooses γ = T_target / T_draft (Theorem 1) as it was measured for each batch size, following it as it drifts, and
    the serial schedule at its best window where the measured acceptance favours that."""

    def __init__(
        self, window: int | None, pre_verify: bool, post_verify: bool, corrections: bool = False, largest: int = 24
    ) -> None:
        """
        Args:
            window: a fixed γ, with which nothing is chosen; None to choose.
            corrections: whether likely corrections are drafted for.
        """
        self.corrections = corrections
        self.fixed = None if window is None else Plan(window, pre_verify, post_verify)
        self.pre_verify, self.post_verify, self.largest = pre_verify, post_verify, largest
        self.tuners: dict[int, WindowTuner] = {}
        self.foreseen: dict[int, tuple[float, float]] = {}
        """corrections that were drafted for, and all, per batch size"""

    def _tuner(self, rows: int) -> WindowTuner:
        return self.tuners.setdefault(rows, WindowTuner())

    def saw_draft(self, rows: int, seconds: float) -> None:
        self._tuner(rows).observe_draft(seconds)

    def saw_target(self, rows: int, width: int, seconds: float) -> None:
        self._tuner(rows).observe_verify(width, seconds)

    def saw_tests(self, rows: int, tested: list[int], accepted: list[int]) -> None:
        self._tuner(rows).observe_acceptance(tested, accepted)

    def saw_corrections(self, rows: int, made: int, foreseen: int) -> None:
        before = self.foreseen.get(rows, FORESEEN)
        self.foreseen[rows] = (0.98 * before[0] + foreseen, 0.98 * before[1] + made)

    def plan(self, rows: int) -> Plan:
        if self.fixed is not None:
            return self.fixed
        tuner = self._tuner(rows)
        overlapped = Plan(tuner.window, self.pre_verify, self.post_verify)
        if tuner.draft_seconds is None or not tuner.verify_seconds:
            return overlapped
        draft, verify_time = tuner.draft_seconds, tuner.verify_time()
        window = min(self.largest, max(1, round(verify_time(1) / draft)))
        window = min(self.largest, max(1, round(verify_time(window) / draft)))
        overlapped = Plan(window, self.pre_verify, self.post_verify)
        if not (self.pre_verify and self.post_verify):
            return overlapped
        alpha = tuner.accepted / tuner.tested
        serial = best_window(alpha, verify_time, draft, self.largest)
        foreseen, made = self.foreseen.get(rows, FORESEEN if self.corrections else (0.0, 1.0))
        speed = pearl_tokens_per_second(alpha, window, verify_time(window), draft, foreseen / made)
        if serial and tokens_per_second(alpha, serial, verify_time, draft) > speed:
            return Plan(serial, pre_verify=False, post_verify=False)
        return overlapped
