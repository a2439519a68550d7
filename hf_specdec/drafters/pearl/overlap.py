"""The schedule of PEARL as pure decisions (Liu et al. 2024, Figure 3 and Algorithm 2).

A row *carries* drafted tokens that the target has not seen. In every round the target is fed the row's last accepted
token and the carried ones, and the draft model goes on behind them meanwhile. Whether the row carries anything decides
its mode, and the target's tests decide what it carries into the next round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from .likely import Likely


class Drafted(NamedTuple):
    """A drafted token."""

    token: int
    q: float = 1.0
    """of the token; 1 where the draft does not sample"""
    likely: Likely | None = None
    """q of others at its place; None where the draft does not sample"""


Chain = list[Drafted]
"""drafted tokens, one behind the other"""


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


class Mode(Enum):
    """How a row spends a round."""

    PRE_VERIFY = "pre-verify"
    """The row carries nothing. The target tests x1 while x2 … xγ are drafted (§3.2)."""
    POST_VERIFY = "post-verify"
    """The row carries x2 … xγ, as x1 was tested a round ago. The target tests them and x(γ+1), the first token that is
    drafted meanwhile (§3.3)."""
    SERIAL = "serial"
    """Nothing is drafted meanwhile. The target tests what the row carries, and adds a token of its own."""


class Outcome(Enum):
    """What the target's tests of a row lead to."""

    PASSED = "passed"
    """All tests passed, that of a token drafted meanwhile included. The other new tokens are carried on: post-verify
    follows."""
    REJECTED = "rejected"
    """A token was replaced by its correction. What was drafted behind it is dropped, and pre-verify follows; or
    post-verify, where the draft model has foreseen the correction and drafted behind it."""
    OVER = "over"
    """The row stopped, or the target added a token behind all that was drafted. The next round begins anew."""


@dataclass(frozen=True)
class Turn:
    """One row's part in a round."""

    carried: Chain
    """what the target is fed behind the last accepted token"""
    wanted: int
    """tokens to draft behind `carried` while the target verifies"""

    @property
    def mode(self) -> Mode:
        if not self.wanted:
            return Mode.SERIAL
        return Mode.POST_VERIFY if self.carried else Mode.PRE_VERIFY

    def tested(self, fresh: Chain) -> Chain:
        """The tokens that are tested, where `fresh` is what has been drafted behind the carried ones so far."""
        return self.carried + fresh[:1]

    def outcome(self, fresh: Chain, accepted: int, stopped: bool) -> Outcome:
        """What comes next, once so many of the tested tokens were accepted."""
        if stopped:
            return Outcome.OVER
        if accepted < len(self.tested(fresh)):
            return Outcome.REJECTED
        return Outcome.PASSED if fresh else Outcome.OVER


NO_TURN = Turn([], 0)
"""of a row that the target decodes alone"""


def drafted_first(plan: Plan, carried: Sequence[Chain], room: Sequence[int]) -> list[int]:
    """[B] tokens to draft before the target is fed: without pre-verify a row that carries nothing waits for a draft.

    Args:
        room: [B] tokens that may be drafted for each row in all.
    """
    if plan.pre_verify:
        return [0] * len(carried)
    return [0 if chain else min(plan.window, most) for chain, most in zip(carried, room, strict=True)]


def turn(plan: Plan, carried: Chain, room: int) -> Turn:
    """A row's part in the next round.

    Args:
        room: tokens that may be drafted in all, the carried ones included.
    """
    overlaps = plan.post_verify or (plan.pre_verify and not carried)
    return Turn(carried, min(plan.window, max(0, room - len(carried))) if overlaps else 0)


def in_step(turns: Sequence[Turn], passive: Sequence[bool]) -> list[Turn]:
    """The turns of a batch in lockstep, whose rows carry and draft as much as each other.

    Args:
        passive: [B] rows that are finished, which do not hold the others back. They carry what another one does.
    """
    active = [turn for turn, out in zip(turns, passive, strict=True) if not out]
    width, wanted = min(len(turn.carried) for turn in active), min(turn.wanted for turn in active)
    chains = [active[0].carried if out else turn.carried for turn, out in zip(turns, passive, strict=True)]
    return [replace(turn, carried=chain[:width], wanted=wanted) for turn, chain in zip(turns, chains, strict=True)]


def together(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of a batch in lockstep: one rejection ends the round for all rows."""
    if Outcome.REJECTED not in outcomes:
        return list(outcomes)
    return [Outcome.OVER if outcome is Outcome.PASSED else outcome for outcome in outcomes]
