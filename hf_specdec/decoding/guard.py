"""A drafter can only cost time: one that raises, stalls or answers nonsense is dropped, the target goes on alone."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import warn
from ..protocol import Draft, DraftContext, DraftSession, Sequences
from ..schedule import AnyDrafter
from .checks import checked

T = TypeVar("T")


class GuardedSession:
    """A `DraftSession` that never raises; one that is late is dropped."""

    def __init__(self, drafter: AnyDrafter, context: DraftContext) -> None:
        self.name = type(drafter).__name__
        self.session: DraftSession | None = None
        self.device, self.vocab = context.device, context.vocab_size
        self.session = self._guard(lambda: _opened(drafter, context))

    @property
    def alive(self) -> bool:
        return self.session is not None

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """What the session says; None where it was dropped."""
        session = self.session
        return None if session is None else self._guard(lambda: action(session))

    def tell(self, action: Callable[[Any], object]) -> None:
        self.ask(action)

    def draft(self, sequences: Sequences, budget: list[int]) -> Draft:
        """At most `budget` tokens per row; an empty draft where there is nothing to be had."""
        session, rows = self.session, len(budget)
        began = time.perf_counter()
        if session is None or not any(budget):
            return self._empty(rows)
        self._guard(lambda: session.start_draft(sequences, list(budget)))
        late = self.session is not None and self._guard(lambda: self._is_late(session, began))
        if late:
            self.drop(f"a draft took longer than {session.patience} seconds")
        draft = self.ask(lambda session: checked(session, session.take(), rows, budget, self.device, self.vocab))
        return self._empty(rows) if draft is None else draft

    def _is_late(self, session: DraftSession, began: float) -> bool:
        """Wait for the draft; whether it took longer than the session has patience."""
        while not session.poll():
            if time.perf_counter() - began > session.patience:
                return True
            time.sleep(1e-4)
        return time.perf_counter() - began > session.patience

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
        if self.session is not None:
            warn(f"{self.name} was dropped: {reason}. The target finishes the text alone.")
        self.close()

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:
                warn(f"{self.name} could not be closed: {error!r}")

    def _guard(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:
            reason = f"it raised {error!r}"
            if self.session is None:  # while it was being started
                warn(f"{self.name} was dropped: {reason}. The target finishes the text alone.")
            self.drop(reason)
            return None

    def _empty(self, rows: int) -> Draft:
        return Draft.from_lists([[]] * rows, self.device)


def _opened(drafter: AnyDrafter, context: DraftContext) -> DraftSession:
    session = drafter.start(context)
    if not isinstance(session, DraftSession):
        raise TypeError(f"{type(drafter).__name__}.start returned {type(session).__name__}, not a DraftSession")
    return session
