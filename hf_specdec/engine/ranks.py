"""One drafter for a target that is spread over several ranks: they must all feed it the same tokens.

What a drafter proposes may depend on the clock: an automatic window, a worker in the background, patience. So only one
rank, the leader, has a drafter at work in a call, and the others take over whatever it was told.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from ..protocol import Draft, DraftContext, Sequences
from ..target.ranks import Ranks
from .fitting import no_draft
from .guard import Guard, GuardedDrafter, GuardedSession
from .traits import Traits

T = TypeVar("T")


class SharedSession(Guard):
    """The leader's guarded session, and on the other ranks its answers."""

    def __init__(self, ranks: Ranks, drafter: GuardedDrafter, context: DraftContext) -> None:
        self.ranks, self.context, self.alive = ranks, copy(context), True
        self.own = GuardedSession(drafter, context) if ranks.leads else None
        traits = self._answer(lambda own: own.traits) or Traits()
        self.traits = traits._replace(drafts_early=False)  # what is accepted is told to the leader alone

    def _answer(self, action: Callable[[GuardedSession], T]) -> T | None:
        """What the leader's session says, everywhere; None where the drafter was given up."""
        if not self.alive:
            return None
        own = self.own
        told = None if own is None else (action(own), own.alive)
        answer, self.alive = self.ranks.share(told, self.context.device)  # type: ignore[misc]
        return answer

    def ask(self, action: Callable[[Any], T]) -> T | None:
        return self._answer(lambda own: own.ask(action))

    def tell(self, action: Callable[[Any], T]) -> T | None:
        """What has no answer concerns the leader alone."""
        return None if self.own is None else self.own.tell(action)

    def draft(self, sequences: Sequences, room: list[int], most: int, pads: Sequence[int | None]) -> Draft:
        draft = self._answer(lambda own: own.draft(sequences, room, most, pads))
        return no_draft(len(room), self.context.device) if draft is None else draft

    def drop(self, reason: str) -> None:
        """Called on every rank at once: they have all seen the same."""
        self.alive = False
        if self.own is not None:
            self.own.drop(reason)

    def note(self) -> str:
        return "" if self.own is None else self.own.note()

    def close(self) -> None:
        self.alive = False
        if self.own is not None:
            self.own.close()
