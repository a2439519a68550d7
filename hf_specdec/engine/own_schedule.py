"""An order that a drafter brings is guarded in every step. One that raises or orders nonsense is dropped with its
drafter; what the target was fed in that round is judged as if nothing had been drafted."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import shown
from ..protocol import Draft, DraftContext, Verdict
from ..schedule import Correct, Guarded, Round, Schedule
from ..transfer import to_device
from .checks import in_form, on_device
from .guard import GuardedDrafter
from .serial import Serial

T = TypeVar("T")


def schedule_of(
    drafter: GuardedDrafter, session: Guarded, context: DraftContext, device: torch.device, vocab: int
) -> Schedule:
    """The drafter's own order of a call, or one after the other. The context is the drafter's: nobody reads it."""
    try:
        own = drafter.drafter.schedule(session, context) if session.alive else None
    except Exception as error:
        session.drop(f"its schedule raised {shown(error)}")
        own = None
    return Serial(session) if own is None else GuardedSchedule(own, session, device, vocab)


class GuardedSchedule:
    """A drafter's own schedule, until it fails or its session is dropped."""

    def __init__(self, own: Schedule, session: Guarded, device: torch.device, vocab: int) -> None:
        self.own, self.session, self.device, self.vocab = own, session, device, vocab
        self.room: list[int] = []

    def _try(self, action: Callable[[Schedule], T], otherwise: T) -> T:
        try:
            return action(self.own) if self.session.alive else otherwise
        except Exception as error:
            self.session.drop(f"its schedule raised {shown(error)}")
            return otherwise

    def feed(self, round: Round) -> Draft:
        self.room = round.room
        return self._try(lambda own: self._held(own.feed(round)), self._empty())

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        def action(own: Schedule) -> tuple[Draft, list[int] | None]:
            draft, answered = own.test(fed)
            if answered is not None and [min(max(0, n), fed.tokens.shape[1]) for n in answered] != answered:
                raise ValueError(f"the schedule answered {answered} nodes, and {fed.tokens.shape[1]} were fed")
            if answered is not None and len(answered) != len(self.room):
                raise ValueError(f"the schedule answered {len(answered)} rows, and the batch has {len(self.room)}")
            held = self._held(draft)
            if held.token_probs is not None and held.q is None and own.correct is None:
                raise ValueError("token_probs need q, or a correction, to replace a rejected token")
            if held.parents is None and held.tokens.shape[1] > fed.tokens.shape[1] + 1:
                raise ValueError(
                    f"the schedule tested {held.tokens.shape[1]} tokens; {fed.tokens.shape[1]} were fed, and "
                    "one more is allowed"
                )
            return _as_fed(held, fed, answered), answered

        nothing: tuple[Draft, list[int] | None] = self._empty(), [0] * len(self.room)
        return self._try(action, nothing)

    def _held(self, draft: Draft) -> Draft:
        """A draft as it is, if it is in form and no longer than there is room for."""
        held = in_form(draft, self.room, self.vocab)
        if held.lengths != draft.lengths:
            raise ValueError(f"lengths {draft.lengths} exceed the room of {self.room} tokens")
        return on_device(held, self.device)

    def _empty(self) -> Draft:
        return Draft.from_lists([[]] * len(self.room), self.device)

    @property
    def correct(self) -> Correct | None:
        own = self._try(lambda own: own.correct, None)
        return None if own is None else lambda p, row, node: self._corrected(own, p, row, node)

    def _corrected(self, own: Correct, p: Tensor, row: int, node: int) -> Tensor:
        """Asked also where the session was lost in between: only the schedule knows what it can still make up for."""
        try:
            found = own(p, row, node)
            if found.shape != p.shape or not found.is_floating_point():
                raise ValueError(f"a correction must have the shape {tuple(p.shape)}, got {tuple(found.shape)}")
            return found.to(p)
        except Exception as error:
            self.session.drop(f"its schedule raised {shown(error)}")
            return p

    def settle(self, verdict: Verdict) -> None:
        self._try(lambda own: own.settle(verdict), None)


def _as_fed(draft: Draft, fed: Draft, answered: list[int] | None) -> Draft:
    """What is judged begins with what was fed, and goes one token at most beyond what the forward answers for."""
    if draft.parents is not None or fed.parents is not None or answered is None:
        return draft
    width = min(draft.tokens.shape[1], fed.tokens.shape[1])
    places = torch.arange(width, device=draft.tokens.device)
    was_fed = places < to_device(answered, draft.tokens.device)[:, None]
    tokens = draft.tokens.clone()
    tokens[:, :width] = torch.where(was_fed, fed.tokens[:, :width], tokens[:, :width])
    lengths = [min(length, n + 1) for length, n in zip(draft.lengths, answered, strict=True)]
    return replace(draft, tokens=tokens, lengths=lengths)
