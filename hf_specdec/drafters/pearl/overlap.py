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


class Side(NamedTuple):
    """A likely correction of a carried token, and what was drafted behind it."""

    at: int
    """which carried token it stands in the place of"""
    chain: Chain
    """as far as the carried tokens go"""
    branch: int
    """of the worker's last order"""


class Carried(NamedTuple):
    """What a row carries into a round."""

    chain: Chain
    sides: Sequence[Side] = ()


class Tree(NamedTuple):
    """What is tested of a row: its carried tokens, its sides, and the first token drafted behind each of them."""

    tokens: list[int]
    parents: list[int]
    lines: list[int]
    """which of those each token belongs to: 0 for the carried ones, n for the n-th side"""

    def add(self, parent: int, line: int, chain: Chain) -> int:
        """The last node of a chain that is hung on a node."""
        for place in chain:
            self.tokens.append(place.token)
            self.parents.append(parent)
            self.lines.append(line)
            parent = len(self.tokens) - 1
        return parent


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
    spare: int = 0
    """tokens that the target may be fed beside a row's carried ones"""


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
    sides: Sequence[Side] = ()
    """branches of what the target is fed, drafted on just as much"""

    @property
    def mode(self) -> Mode:
        if not self.wanted:
            return Mode.SERIAL
        return Mode.POST_VERIFY if self.carried else Mode.PRE_VERIFY

    def tested(self, fresh: Chain) -> Chain:
        """The tokens that are tested, where `fresh` is what has been drafted behind the carried ones so far."""
        return self.carried + fresh[:1]

    @property
    def fed(self) -> int:
        """Tokens that the target is fed."""
        return len(self.carried) + sum(len(side.chain) for side in self.sides)

    def tree(self, fresh: Sequence[Chain] = ()) -> Tree:
        """What the target is fed, and behind that what is tested of `fresh`: of what has been drafted so far behind the
        carried tokens, and behind each side."""
        tokens = [place.token for place in self.carried]
        tree = Tree(tokens, list(range(-1, len(tokens) - 1)), [0] * len(tokens))
        ends = [len(tokens) - 1]
        for line, side in enumerate(self.sides, start=1):
            ends.append(tree.add(side.at - 1, line, side.chain))
        for line, (end, chain) in enumerate(zip(ends, fresh, strict=False)):
            tree.add(end, line, chain[:1])
        return tree

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


def turn(plan: Plan, carried: Chain, room: int, sides: Sequence[Side] = ()) -> Turn:
    """A row's part in the next round.

    Args:
        room: tokens that may be drafted in all, the carried ones included.
        sides: of the carried tokens; those are fed, one after the other, that there is room and spare width for.
    """
    overlaps = plan.post_verify or (plan.pre_verify and not carried)
    wanted = min(plan.window, max(0, room - len(carried))) if overlaps else 0
    left, fed = min(plan.spare, room - len(carried)) if wanted else 0, []
    for side in sides:
        if len(side.chain) <= left:
            fed.append(side)
            left -= len(side.chain)
    return Turn(carried, wanted, fed)


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
