"""A drafter can only cost time: one that raises, stalls or answers nonsense is dropped, the target goes on alone."""

from collections.abc import Callable, Sequence
from copy import copy
from numbers import Integral
from typing import Any, TypeVar

from torch import Tensor

from ..budget import nodes_that_pay
from ..clock import nap, now, real
from ..errors import shortened, shown, warn
from ..protocol import Draft, DraftContext, Sequences
from ..schedule import AnyDrafter
from ..session import DraftSession
from ..stats import SpeculationStats
from .checks import Unfit, expect
from .fitting import checked_draft, fit, no_draft
from .traits import Traits, traits_of

T = TypeVar("T")
MOST_NOTES = 8
"""of a session, that are kept"""


def nothing() -> None:
    """What is answered instead where there is no answer."""


class Guard:
    """Calls what belongs to a drafter. What that raises goes no further: the drafter is dropped."""

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
        raise NotImplementedError

    def attempt(self, action: Callable[..., T], otherwise: Callable[[], T], *given: Any) -> T:
        """What the action makes of what it is given; where it raises, what is given `otherwise`."""
        try:
            return action(*given)
        except Unfit as error:
            self.drop(str(error))
        except Exception as error:
            self.drop(f"it raised {shown(error)}")
        return otherwise()


class GuardedDrafter(Guard):
    """A drafter for one call, which never raises: the first thing of it that does is the last it is asked for."""

    def __init__(self, drafter: AnyDrafter) -> None:
        self.drafter, self.name = drafter, type(drafter).__name__
        self.dropped = ""
        """why it was given up, in a sentence"""
        self.proposes_trees = self.brings_runner = False
        self.recordable = True
        """whether a runner of its own, if it brings one, can be recorded"""
        self.because = ""
        self.ask(self._read)

    def _read(self, drafter: AnyDrafter) -> None:
        """What it says of itself."""
        self.proposes_trees, self.because = bool(drafter.proposes_trees), str(drafter.because)
        self.brings_runner = bool(drafter.brings_runner)
        self.recordable = not self.brings_runner or bool(drafter.recordable)

    def ask(self, action: Callable[..., T], *given: Any) -> T | None:
        """What the drafter says, who comes before what else is given; None where it was dropped."""
        return None if self.dropped else self.attempt(action, nothing, self.drafter, *given)

    def takes_ragged(self) -> bool:
        return bool(self.ask(lambda d: bool(d.takes_ragged())))

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return str(self.ask(lambda d: d.why_not(prompt_ids, source)) or "")

    def report(self, stats: SpeculationStats) -> None:
        """Leave the call's statistics with the drafter, also with one that was dropped."""
        stats.notes[:0] = filter(None, [self.because])
        self.attempt(setattr, nothing, self.drafter, "last_stats", stats)

    def drop(self, reason: str) -> None:
        if not self.dropped:
            self.dropped = (
                f"{self.name} was dropped: {reason}. The text is not affected: the target finishes it without drafts"
            )
            warn(self.dropped)


class GuardedSession(Guard):
    """A `DraftSession` that never raises; one that is late is dropped."""

    def __init__(self, drafter: GuardedDrafter, context: DraftContext) -> None:
        self.drafter, self.context = drafter, copy(context)  # of its own, which the session does not see
        self.session = drafter.ask(opened, context)
        self.alive = self.session is not None
        self.traits = self.ask(traits_of, self.context) or Traits()
        self.was_cut = False
        self.rounds = self.unpaid = 0
        """all with a draft, and those of them in which none of it promised to pay"""

    def ask(self, action: Callable[..., T], *given: Any) -> T | None:
        """What the session says, which comes before what else is given; None where it was dropped."""
        return None if self.session is None else self.attempt(action, nothing, self.session, *given)

    tell = ask

    def draft(self, sequences: Sequences, room: list[int], most: int, pads: Sequence[int | None]) -> Draft:
        """Chains or trees of at most `room` [B] tokens one below the other, fit to be fed to the target; an empty
        draft where there is nothing to be had.

        Args:
            most: nodes of a row.
            pads: as of `fit`.
        """
        draft = None
        if self.session is not None and any(room):
            draft = self.attempt(self._drafted, nothing, self.session, sequences, room, most, pads)
        return no_draft(len(room), self.context.device) if draft is None else draft

    def _drafted(
        self, session: DraftSession, sequences: Sequences, room: list[int], most: int, pads: Sequence[int | None]
    ) -> Draft:
        began, asked, patience = now(), real(), self.traits.patience
        session.start_draft(sequences, list(room))
        while not session.poll() and real() - asked <= patience:
            nap()
        if real() - asked > patience:
            raise Unfit(f"a draft took longer than {shown(patience)} seconds")
        draft = checked_draft(session.take(), room, self.context.vocab_size)
        spent = float(session.spent) if self.context.cost.is_set else now() - began
        verified = self.nodes_to_verify(draft, room, most, spent)
        return fit(draft, verified, self.context, pads, session.q)

    def nodes_to_verify(self, draft: Draft, room: Sequence[int], most: int, spent: float) -> list[int]:
        """[B] nodes that are verified: of those that say their chances, as many as give most tokens per second.

        Draws are all verified: whether one is must not depend on which token it is.

        Args:
            most: there may be.
            spent: seconds that the draft has taken.
        """
        drawn = (draft.q is not None or draft.token_probs is not None) and not draft.least
        if draft.survival is None or drawn or not any(draft.lengths):
            if (longest := max(draft.lengths)) > most and not self.was_cut:
                self.was_cut = True
                warn(
                    f"{self.drafter.name} drafted {longest} tokens for one row, and the target is fed {most} of them "
                    "at most. The text is not affected"
                )
            return [most] * len(room)
        least = draft.least or [0] * len(room)
        chances = [row[:most] for row, left in zip(draft.survival, room, strict=True) if left]
        count = nodes_that_pay(chances, len(room), self.context.cost, spent, self.context.advance, max(least))
        timed = self.context.cost.tried(len(room)) is not None  # a plain round to be timed says nothing of this draft
        self.rounds, self.unpaid = self.rounds + 1, self.unpaid + (count == 0 and not timed)
        return [min(max(count, sure), most) for sure in least]

    def note(self) -> str:
        """How often nothing was verified, as it would not have paid; empty where that never was."""
        if not self.unpaid:
            return ""
        return (
            f"{self.unpaid} of {self.rounds} drafts were not verified, because too few of their tokens were likely "
            "to be accepted"
        )

    def drop(self, reason: str) -> None:
        self.drafter.drop(reason)
        self.close()

    def close(self) -> None:
        session, self.session, self.alive = self.session, None, False
        if session is not None:
            try:
                session.close()
            except Exception as error:
                warn(f"{self.drafter.name} raised {shown(error)} when it was closed. The text is not affected")


def opened(drafter: AnyDrafter, context: DraftContext) -> DraftSession:
    """A session of the drafter.

    Raises:
        Unfit: what it has started is none.
    """
    session = drafter.start(context)
    expect(isinstance(session, DraftSession), "what start returns", "a DraftSession", session)
    return session


def take_over(told: SpeculationStats, stats: SpeculationStats) -> None:
    """Add what a session has told of itself in `DraftContext.stats`, where it may have written anything."""
    for name in ("draft_calls", "window"):
        count = getattr(told, name, 0)
        setattr(stats, name, max(0, int(count)) if isinstance(count, Integral) else 0)
    notes = getattr(told, "notes", None)
    if isinstance(notes, list):
        stats.notes += [shortened(note) for note in notes[:MOST_NOTES] if isinstance(note, str)]
