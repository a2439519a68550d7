"""One drafter for a target that is spread over several ranks: they must all feed it the same tokens.

What a drafter proposes may depend on the clock: an automatic window, a worker in the background, patience. So only one
rank, the leader, has a drafter at work in a call, and the others take over whatever it was told.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ..drafters.base import Drafter
from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..target.ranks import Ranks
from .guard import GuardedSession

T = TypeVar("T")


class SharedSession(GuardedSession):
    """The leader's guarded session, and on the other ranks its answers."""

    def __init__(self, ranks: Ranks, guard: type[GuardedSession], drafter: Drafter, context: DraftContext) -> None:
        self.ranks, self.context = ranks, context
        self.session: Any = "the leader's"
        self.own = guard(drafter, context) if ranks.leads else None
        self._answer(lambda own: None)

    def _answer(self, action: Callable[[Any], T]) -> T | None:
        """What the leader's session says, everywhere; None where the drafter was given up."""
        if self.session is None:
            return None
        own = self.own
        told = None if own is None else (action(own), own.session is not None)
        answer, alive = self.ranks.share(told, self.context.device)  # type: ignore[misc]
        self.session = self.session if alive else None
        return answer

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """For schedules whose guard has more to ask."""
        return self._answer(lambda own: own.ask(action))

    def tell(self, action: Callable[[Any], object]) -> None:
        """What has no answer concerns the leader alone."""
        own: Any = self.own
        if own is not None:
            own.tell(action)

    def draft(self, sequences: Sequences, budget: list[int]) -> Draft:
        draft = self._answer(lambda own: own.draft(sequences, budget))
        return self._empty(sequences) if draft is None else draft

    def residual(self, row: int, node: int) -> Tensor | None:
        return self._answer(lambda own: own.residual(row, node))

    def observe(self, verdict: Verdict) -> None:
        self._answer(lambda own: own.observe(verdict))

    def drop(self, reason: str) -> None:
        """Called on every rank at once: they have all seen the same."""
        self.session = None
        if self.own is not None:
            self.own.drop(reason)

    def close(self) -> None:
        self.session = None
        if self.own is not None:
            self.own.close()
