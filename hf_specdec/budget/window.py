"""γ by itself: the window that yields most tokens per second, from what was measured in this run."""

from ..theory import best_window
from .cost import LOOK_STEPS, Cost, DraftCost

FIRST = 5
"""γ before anything was measured"""
LARGEST = 16
PRIOR = 4.0
"""tokens that a guess counts as"""


class Window:
    """Chooses γ to maximise E(γ) / (T(γ + 1) + γ · T_draft + T_opening); of candidates see `theory.tokens_per_second`.

    For drafts that nobody looks at before they are whole: of steps that are decided one by one see `budget`. Accepted
    tokens come in runs, so the first one has an α of its own. Both are running means that forget, so γ follows the
    text. Theorem 3.8 is the special case of one α and T(γ + 1) = T(1).
    """

    def __init__(self, memory: float = 0.98) -> None:
        self.memory = memory
        self.gamma = 0
        """the last that was chosen; none at first"""
        # A prior of a few tokens keeps the first rounds from jumping to conclusions.
        self.accepted, self.tested = 3.0, 4.0
        self._first = self._behind = (0.0, 0.0)
        """accepted and tested tokens, of those that began a draft, and of those behind an accepted one"""
        self.rescued, self.missed = 1.0, 3.0
        """drafted tokens that were wrong beside another candidate that was right, and all that were wrong"""

    @property
    def alpha(self) -> float:
        """How often a drafted token was right."""
        return self.accepted / self.tested

    @property
    def first(self) -> float:
        """How often the first token of a draft was right; as often as any, until that has been seen."""
        return (self._first[0] + PRIOR * self.alpha) / (self._first[1] + PRIOR)

    @property
    def behind(self) -> float:
        """How often one behind an accepted one was; as often as any, where none was drafted of late."""
        return (self._behind[0] + PRIOR * self.alpha) / (self._behind[1] + PRIOR)

    @property
    def rescue(self) -> float:
        """How often another candidate was right where a drafted token was wrong."""
        return self.rescued / self.missed

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Per row, of so many drafted tokens so many leading ones were accepted."""
        rows = [(k, n) for k, n in zip(drafted, accepted, strict=True) if k]
        self.accepted, self.tested = self._seen((self.accepted, self.tested), [(n, n + (n < k)) for k, n in rows])
        self._first = self._seen(self._first, [(n > 0, 1) for _, n in rows])
        self._behind = self._seen(self._behind, [(max(n - 1, 0), min(n, k - 1)) for k, n in rows])

    def _seen(self, before: tuple[float, float], now: list[tuple[int, int]]) -> tuple[float, float]:
        """What was seen before counts less."""
        accepted, tested = before
        return self.memory * accepted + sum(n for n, _ in now), self.memory * tested + sum(n for _, n in now)

    def observe_candidates(self, rescued: list[bool]) -> None:
        """Per drafted token that was wrong, whether another candidate was right."""
        self.rescued, self.missed = self._seen((self.rescued, self.missed), [(right, 1) for right in rescued])

    def choose(self, cost: Cost, draft_cost: DraftCost, rows: int, candidates: int = 1) -> int:
        """γ for the next round; 0 where drafting does not pay."""
        if draft_cost.step is None or not cost.known:
            return FIRST
        if cost.tried(rows) == 0:
            return 0
        rescue = self.rescue if candidates > 1 else 0.0
        alpha, first, seconds = self.behind, self.first, cost.round(rows)
        step, opening = draft_cost.step, draft_cost.opening
        self.gamma = best_window(alpha, seconds, step, LARGEST, candidates, rescue, first, opening)
        return self.gamma or LOOK_STEPS if draft_cost.asked(self.gamma > 0, cost, rows) else 0


def why_rested(rested: int, rounds: int, c: float | None, alpha: float) -> list[str]:
    """How often drafting was left out, and why; nothing where it was not, or where it cannot be said."""
    if not rested or c is None:
        return []
    return [
        f"drafting was stopped in {rested} of {rounds} rounds, as it would have cost more than it gained: a draft step "
        f"costs {c:.2g} of a target step, the draft is right {alpha:.0%} of the time"
    ]
