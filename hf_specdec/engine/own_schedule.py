"""An order that a drafter brings is guarded in every step. One that raises or orders nonsense is dropped with its
drafter; what the target was fed in that round is judged as if nothing had been drafted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..protocol import Draft, DraftContext, Verdict
from ..schedule import Round, Schedule
from ..transfer import to_device
from .checks import Unfit, expect
from .fitting import checked_draft, cut, fit, no_draft, on_device, with_q
from .guard import GuardedDrafter, GuardedSession
from .ranks import SharedSession

T = TypeVar("T")


def schedule_of(
    drafter: GuardedDrafter, session: GuardedSession | SharedSession, context: DraftContext
) -> "GuardedSchedule | None":
    """The drafter's own order of a call; None where it drafts, then verifies. The context is the drafter's: nobody
    reads it."""
    if not session.alive:
        return None
    own = session.attempt(lambda: drafter.drafter.schedule(session, context), lambda: None)
    return None if own is None else GuardedSchedule(own, session)


class GuardedSchedule:
    """A drafter's own schedule, until it fails or its session is dropped."""

    def __init__(self, own: Schedule, session: GuardedSession | SharedSession) -> None:
        self.own, self.session, self.context = own, session, session.context
        self.room: list[int] = []

    def _ask(self, action: Callable[[Schedule], T], otherwise: Callable[[], T]) -> T:
        return self.session.attempt(lambda: action(self.own), otherwise) if self.session.alive else otherwise()

    def feed(self, round: Round, most: int, pads: Sequence[int | None]) -> Draft:
        """What the target verifies, of each row at most so many nodes; `pads` as of `fit`."""
        self.room = round.room
        each = [most] * len(round.room)
        return self._ask(lambda own: fit(self._checked(own.feed(round)), each, self.context, pads), self._nothing)

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        return self._ask(lambda own: self._tested(own, fed), lambda: (self._nothing(), [0] * len(self.room)))

    def _tested(self, own: Schedule, fed: Draft) -> tuple[Draft, list[int] | None]:
        draft, answered = own.test(fed)
        if answered is None:
            return fed, None
        width = fed.tokens.shape[1]
        fine = len(answered) == len(self.room) and all(0 <= n <= width for n in answered)
        expect(fine, "answered nodes", f"{len(self.room)} numbers from 0 to {width}, as many as were fed", answered)
        draft = on_device(self._checked(draft), self.context.device)
        expect(draft.parents is None is fed.parents, "a draft of more than was fed", "a chain", draft.parents)
        return _from_fed(draft, fed.tokens, answered), answered

    def _checked(self, draft: Draft) -> Draft:
        checked = checked_draft(draft, self.room, self.context.vocab_size)
        if checked.token_probs is not None and checked.q is None:
            raise Unfit("token_probs need q, to replace a rejected token")
        return with_q(checked, self.context.vocab_size)

    def _nothing(self) -> Draft:
        return no_draft(len(self.room), self.context.device)

    def settle(self, verdict: Verdict) -> None:
        self._ask(lambda own: own.settle(verdict), lambda: None)


def _from_fed(draft: Draft, fed: Tensor, answered: list[int]) -> Draft:
    """The draft, beginning with the tokens that were fed: in each row as many of them as the forward answers for, and
    one more of its own."""
    draft = cut(draft, [min(length, n + 1) for length, n in zip(draft.lengths, answered, strict=True)])
    tokens, width = draft.tokens.clone(), min(draft.tokens.shape[1], fed.shape[1])
    was_fed = torch.arange(width, device=fed.device) < to_device(answered, fed.device)[:, None]
    tokens[:, :width] = torch.where(was_fed, fed[:, :width], tokens[:, :width])
    return replace(draft, tokens=tokens, known=None)
