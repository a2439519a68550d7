"""The schedule of PEARL as pure decisions (Liu et al. 2024, Figure 3 and Algorithm 2).

A row *carries* drafted tokens that the target has not seen. In every round the target is fed the row's last accepted
token and the carried ones, and the draft model goes on behind them meanwhile:

- *Pre-verify*: the row carries nothing. The target tests x1 while x2 … xγ are drafted (§3.2).
- *Post-verify*: the row carries x2 … xγ, as x1 was tested a round ago. The target tests them and x(γ+1), the first
  token that is drafted meanwhile (§3.3).
- *Serial*: nothing is drafted meanwhile. The target tests what the row carries, and adds a token of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...budget.overlap import Plan
from .token import DraftToken, DraftTokens


class Part(NamedTuple):
    """One row's part in a round."""

    carried: DraftTokens = ()
    """what the target is fed behind the last accepted token"""
    wanted: int = 0
    """tokens to draft behind that while the target verifies"""
    fresh: DraftTokens = ()
    """what has been drafted of these so far"""

    @property
    def tested(self) -> list[DraftToken]:
        return [*self.carried, *self.fresh[:1]]


def drafted_first(plan: Plan, carried: Sequence[DraftTokens], room: Sequence[int]) -> list[int]:
    """[B] tokens to draft before the target is fed: without pre-verify a row that carries nothing waits for a draft.

    Args:
        room: [B] tokens that may be drafted for each row in all.
    """
    if plan.pre_verify:
        return [0] * len(carried)
    return [0 if held else min(plan.window, most) for held, most in zip(carried, room, strict=True)]


def part(plan: Plan, carried: DraftTokens, room: int) -> Part:
    """A row's part in the next round.

    Args:
        room: tokens that may be drafted in all, the carried ones included.
    """
    overlaps = plan.post_verify or (plan.pre_verify and not carried)
    return Part(carried, min(plan.window, max(0, room - len(carried))) if overlaps else 0)


def in_step(parts: Sequence[Part], passive: Sequence[bool]) -> list[Part]:
    """The parts of a batch in lockstep, whose rows carry and draft as much as each other.

    Args:
        passive: [B] rows that are finished, which do not hold the others back. They carry what another one does.
    """
    active = [part for part, out in zip(parts, passive, strict=True) if not out]
    width, wanted = min(len(part.carried) for part in active), min(part.wanted for part in active)
    carried = [(active[0] if out else part).carried[:width] for part, out in zip(parts, passive, strict=True)]
    return [Part(held, wanted) for held in carried]


def outcomes(
    parts: Sequence[Part], accepted: Sequence[int], stopped: Sequence[bool], lockstep: bool
) -> tuple[list[int], list[int]]:
    """Which of the rows go on from what was drafted, once so many of the tested tokens were accepted in each.

    A row that stopped does not, nor one to which the target has added a token behind all that was drafted.

    Args:
        lockstep: one rejection ends the round for all rows.

    Returns:
        Those that passed all tests, that of a token drafted meanwhile included: they carry the other new tokens, and
        post-verify follows. And those of which a token was replaced by its correction: what was drafted behind it is
        dropped, and pre-verify follows; or post-verify, where the correction was foreseen and drafted for.
    """
    going = [b for b, over in enumerate(stopped) if not over]
    rejected = [b for b in going if accepted[b] < len(parts[b].tested)]
    passed = [b for b in going if parts[b].fresh and b not in rejected]
    return ([] if lockstep and rejected else passed), rejected
