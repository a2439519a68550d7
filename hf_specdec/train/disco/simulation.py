"""Play a stop rule over records: which rounds it would have made, and what they would have cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from .records import Record


class Round(NamedTuple):
    """One draft and its verification."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class Costs:
    """What was measured of the two models."""

    draft: float
    """seconds of one draft step"""
    verify: Callable[[int], float]
    """seconds of a target forward by its width in tokens"""
    rule: float = 0.0
    """seconds that asking the classifier adds to a draft step"""

    def with_rule(self) -> "Costs":
        """For rules that ask the classifier."""
        return Costs(self.draft + self.rule, self.verify)

    def seconds(self, rounds: Sequence[Round]) -> float:
        """What these rounds take."""
        return sum(r.drafted * self.draft + self.verify(r.drafted + 1) for r in rounds)


class Rule(Protocol):
    """Whether to draft one more token."""

    def goes_on(self, seen: list[float]) -> bool:
        """Asked after each drafted token, with a value for each token drafted in this round."""


@runtime_checkable
class Hesitant(Protocol):
    """A rule that may draft nothing."""

    def begins(self) -> bool:
        """Asked before each round."""


@runtime_checkable
class Learner(Protocol):
    """A rule that changes with what it sees."""

    def observe(self, seen: list[float], accepted: int) -> None:
        """How the round ended."""


@dataclass
class Values:
    """What a rule reads of one text: a number per position, and per position after a rejection."""

    there: list[float]
    """[N]"""
    after: list[list[float]]
    """[N][R]"""
    accepted: list[bool]
    """[N]"""


def values_of(record: Record, value: Callable[[Tensor], Tensor]) -> Values:
    """Apply a function of features [..., k + 4] → [...] to a record."""
    return Values(value(record.features).tolist(), value(record.after).tolist(), record.accepted.tolist())


def play(values: Values, rule: Rule, longest: int) -> list[Round]:
    """The rounds of one text; its first token comes out of the prefill.

    Args:
        longest: SLmax. The record must reach that far after a rejection.
    """
    end, start = len(values.there), 1
    rounds = []
    learner = rule if isinstance(rule, Learner) else None
    while start < end:
        room = min(longest, end - start - 1)  # the round's last token is the target's own
        if isinstance(rule, Hesitant) and not rule.begins():
            room = 0
        seen: list[float] = []
        accepted, rejected = 0, -1
        while len(seen) < room:
            at = start + len(seen)
            if rejected >= 0:
                seen.append(values.after[rejected][at - rejected - 1])
            else:
                seen.append(values.there[at])
                if values.accepted[at]:
                    accepted += 1
                else:
                    rejected = at
            if len(seen) < room and not rule.goes_on(seen):
                break
        if learner is not None:
            learner.observe(seen, accepted)
        rounds.append(Round(len(seen), accepted))
        start += accepted + 1
    return rounds
