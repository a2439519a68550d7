"""A drafter can only cost time: one that raises, stalls or answers nonsense is dropped, the target goes on alone."""

from collections.abc import Callable
from copy import copy
from numbers import Integral
from typing import Any, TypeVar

from torch import Tensor

from ..budget import nodes_that_pay
from ..clock import Deadline, now
from ..errors import shortened, shown, warn
from ..protocol import Draft, DraftContext, Sequences
from ..schedule import AnyDrafter
from ..session import DraftSession
from ..stats import SpeculationStats
from .checks import Unfit, checked_draft, cut, expect, most_nodes, on_device, with_q
from .traits import Traits, traits_of

T = TypeVar("T")
MOST_NOTES = 8
"""of a session, that are kept"""


class Guard:
    """Calls what belongs to a drafter. What that raises goes no further: the drafter is dropped."""

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
        raise NotImplementedError

    def attempt(self, action: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What the action gives; where it raises, what is given `otherwise`."""
        try:
            return action()
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

    def ask(self, action: Callable[[AnyDrafter], T]) -> T | None:
        """What the drafter says; None where it was dropped."""
        return None if self.dropped else self.attempt(lambda: action(self.drafter), lambda: None)

    def takes_ragged(self) -> bool:
        return bool(self.ask(lambda d: bool(d.takes_ragged())))

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return str(self.ask(lambda d: d.why_not(prompt_ids, source)) or "")

    def report(self, stats: SpeculationStats) -> None:
        """Leave the call's statistics with the drafter, also with one that was dropped."""
        stats.notes[:0] = filter(None, [self.because])
        self.attempt(lambda: setattr(self.drafter, "last_stats", stats), lambda: None)

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
        self.session = drafter.ask(lambda d: opened(d, context))
        self.traits = self.ask(lambda session: traits_of(session, self.context)) or Traits()
        self.was_cut = False
        self.rounds = self.unpaid = 0
        """all with a draft, and those of them in which none of it promised to pay"""

    @property
    def alive(self) -> bool:
        return self.session is not None

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """What the session says; None where it was dropped."""
        session = self.session
        return None if session is None else self.attempt(lambda: action(session), lambda: None)

    def tell(self, action: Callable[[Any], object]) -> None:
        self.ask(action)

    def draft(self, sequences: Sequences, room: list[int]) -> Draft:
        """At most `room` tokens per row; an empty draft where there is nothing to be had."""
        draft = self.ask(lambda session: self._drafted(session, sequences, room)) if any(room) else None
        return Draft.from_lists([[]] * len(room), self.context.device) if draft is None else draft

    def _drafted(self, session: DraftSession, sequences: Sequences, room: list[int]) -> Draft:
        began, patience = now(), Deadline(self.traits.patience)
        session.start_draft(sequences, list(room))
        while not session.poll() and not patience.over:
            patience.nap(1e-4)
        if patience.over:
            raise Unfit(f"a draft took longer than {shown(self.traits.patience)} seconds")
        draft = checked_draft(session.take(), room, self.context.vocab_size)
        count = self._count(draft, room, now() - began)
        draft = cut(draft, [min(length, count) for length in draft.lengths])
        return on_device(with_q(session, draft, self.context.vocab_size), self.context.device)

    def _count(self, draft: Draft, room: list[int], spent: float) -> int:
        """Nodes of each row that are verified: of those that say their chances, as many as give most tokens per second.

        Draws are all verified: whether one is must not depend on which token it is.
        """
        most, longest = most_nodes(len(room)), max(draft.lengths)
        if longest > most and not self.was_cut:
            self.was_cut = True
            warn(
                f"{self.drafter.name} drafted {longest} tokens for one row, and the target is fed {most} of them at "
                "most. The text is not affected"
            )
        if draft.survival is None or draft.q is not None or draft.token_probs is not None or not longest:
            return most
        chances = [row[:most] for row, left in zip(draft.survival, room, strict=True) if left]
        count = nodes_that_pay(chances, len(room), self.context.cost, spent, self.context.advance)
        timed = self.context.cost.tried(len(room)) is not None  # a plain round to be timed says nothing of this draft
        self.rounds, self.unpaid = self.rounds + 1, self.unpaid + (count == 0 and not timed)
        return min(count, most)

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
        session, self.session = self.session, None
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
    for name in ("draft_calls", "uncorrected_tokens", "window"):
        count = getattr(told, name, 0)
        setattr(stats, name, max(0, int(count)) if isinstance(count, Integral) else 0)
    notes = getattr(told, "notes", None)
    if isinstance(notes, list):
        stats.notes += [shortened(note) for note in notes[:MOST_NOTES] if isinstance(note, str)]
