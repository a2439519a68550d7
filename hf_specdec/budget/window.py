"""γ by itself: the window that yields most tokens per second, from what was measured in this run."""

from collections.abc import Callable

from ..theory import expected_tokens
from .cost import Cost
from .decision import SUMMED, Advance, fastest
from .draft_cost import LOOK_STEPS, DraftCost

FIRST = 5
"""γ before anything was measured"""
LARGEST = 16
WINDOWS = range(LARGEST + 1)
PRIOR = 4.0
"""tokens that a guess counts as"""


class Window:
    """Chooses γ to maximise E(γ) / (T(γ + 1) + γ · T_draft + T_opening).

    For drafts that nobody looks at before they are whole (steps that are decided one by one: `stepwise`). Accepted
    tokens come in runs, so the first one has an α of its own. Both are running means that forget, so γ follows the
    text. Theorem 3.8 is the special case of one α and T(γ + 1) = T(1).
    """

    def __init__(self, memory: float = 0.98) -> None:
        self.memory = memory
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

    def speed(
        self,
        seconds: Callable[[int], float],
        draft_cost: DraftCost,
        rows: int = 1,
        advance: Advance = SUMMED,
        candidates: int = 1,
    ) -> Callable[[int], float]:
        """Tokens per second of all rows by γ, as far as times are known.

        Args:
            seconds: T, duration of a round by the width of its forward.
            rows: those that draft.
            advance: what the tokens of several rows are worth together.
            candidates: k, tokens tried at each position: a verification is of kγ + 1 tokens.
        """
        step, opening = draft_cost.step or 0.0, draft_cost.opening
        rescue = self.rescue if candidates > 1 else 0.0
        counted, power = (1, rows) if advance.lockstep else (rows, 1)  # in step a token is kept where all keep theirs
        behind, first = self.behind**power, self.first**power

        def of(gamma: int) -> float:
            gained = expected_tokens(behind, gamma, rescue, first)
            taken = seconds(candidates * gamma + 1) + gamma * step + (opening if gamma else 0.0)
            return advance.tokens([gained] * counted) / taken

        return of

    def choose(
        self, cost: Cost, draft_cost: DraftCost, rows: int, candidates: int = 1, advance: Advance = SUMMED
    ) -> tuple[int, float]:
        """γ for the next round, 0 where drafting does not pay; and the price of a look, as `DraftCost.asked` has it."""
        if draft_cost.step is None or not cost.known:
            return FIRST, 0.0
        if cost.tried(rows) == 0:
            return 0, 0.0
        speed = self.speed(cost.round(rows), draft_cost, rows, advance, candidates)
        gamma = fastest([speed(n) for n in WINDOWS])
        price = draft_cost.asked(gamma > 0, cost, rows, candidates=candidates)
        return (0, 0.0) if price is None else (gamma or LOOK_STEPS, price)


def why_rested(rested: int, rounds: int, c: float | None, alpha: float) -> list[str]:
    """How often drafting was left out, and why; nothing where it was not, or where it cannot be said."""
    if not rested or c is None:
        return []
    return [
        f"the draft model was not used in {rested} of {rounds} rounds, because it would have cost more than it "
        f"gained: a draft step costs {c:.2g} of a target step, and the expected acceptance rate is {alpha:.0%}"
    ]
