"""A drafter can only cost time: one that raises, stalls or answers nonsense is dropped, the target goes on alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..budget import Cost, nodes_that_pay
from ..clock import Deadline, now
from ..errors import shown, warn
from ..protocol import Draft, DraftContext, DraftSession, Sequences
from ..schedule import AnyDrafter
from ..stats import SpeculationStats
from .checks import cut, in_form, most_nodes, with_q

T = TypeVar("T")


class GuardedDrafter:
    """A drafter for one call, which never raises: the first thing of it that does is the last it is asked for."""

    def __init__(self, drafter: AnyDrafter) -> None:
        self.drafter, self.name, self.alive = drafter, type(drafter).__name__, True
        self.dropped = ""
        """why it was given up, in a sentence"""
        self.proposes_trees = bool(self.ask(lambda d: bool(d.proposes_trees)))
        self.brings_runner = bool(self.ask(lambda d: bool(d.brings_runner)))

    def ask(self, action: Callable[[AnyDrafter], T]) -> T | None:
        """What the drafter says; None where it was dropped."""
        return self.guard(lambda: action(self.drafter), self.drop) if self.alive else None

    def takes_ragged(self) -> bool:
        return bool(self.ask(lambda d: bool(d.takes_ragged())))

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return str(self.ask(lambda d: d.why_not(prompt_ids, source)) or "")

    def start(self, context: DraftContext) -> DraftSession | None:
        return self.ask(lambda d: opened(d, context))

    def report(self, stats: SpeculationStats) -> None:
        """Of every call, also where the drafter was dropped."""
        self.guard(lambda: setattr(self.drafter, "last_stats", stats), self.drop)

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
        if self.alive:
            self.alive = False
            self.dropped = (
                f"{self.name} was dropped: {reason}. The text is not affected: the target finishes it without drafts"
            )
            warn(self.dropped)

    @staticmethod
    def guard(action: Callable[[], T], drop: Callable[[str], None]) -> T | None:
        try:
            return action()
        except Exception as error:
            drop(f"it raised {shown(error)}")
            return None


class GuardedSession:
    """A `DraftSession` that never raises; one that is late is dropped."""

    def __init__(self, drafter: GuardedDrafter, context: DraftContext, cost: Cost) -> None:
        """
        Args:
            cost: the engine's own; the session is given copies.
        """
        self.drafter, self.device, self.vocab = drafter, context.device, context.vocab_size
        self.cost, self.advance = cost, context.advance
        self.session = drafter.start(context)
        self.was_cut = False
        self.rounds = self.unpaid = 0
        """all with a draft, and those of them in which none of it promised to pay"""

    @property
    def alive(self) -> bool:
        return self.session is not None

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """What the session says; None where it was dropped."""
        session = self.session
        return None if session is None else self.drafter.guard(lambda: action(session), self.drop)

    def tell(self, action: Callable[[Any], object]) -> None:
        self.ask(action)

    def draft(self, sequences: Sequences, room: list[int]) -> Draft:
        """At most `room` tokens per row; an empty draft where there is nothing to be had."""
        draft = self.ask(lambda session: self._drafted(session, sequences, room)) if any(room) else None
        return Draft.from_lists([[]] * len(room), self.device) if draft is None else draft

    def _drafted(self, session: DraftSession, sequences: Sequences, room: list[int]) -> Draft | None:
        began, patience = now(), Deadline(session.patience)
        session.context.cost = self.cost.copy()
        session.start_draft(sequences, list(room))
        while not session.poll() and not patience.over:
            patience.nap(1e-4)
        if patience.over:
            self.drop(f"a draft took longer than {shown(session.patience)} seconds")
            return None
        draft = in_form(session.take(), room, self.vocab)
        if not any(draft.lengths):  # nothing of it is fed: that costs nothing either
            nothing = Draft.from_lists([[]] * len(room), self.device)
            nothing.sources = draft.sources
            if draft.token_probs is not None or draft.q is not None:  # it would have been drawn
                nothing.token_probs = torch.zeros(len(room), 0, device=self.device)
            return nothing
        draft = self._paying(self._bounded(draft), room, now() - began)
        return with_q(session, draft, self.device, self.vocab)

    def _paying(self, draft: Draft, room: list[int], spent: float) -> Draft:
        """Of the nodes of all rows as many of the first ones as give most tokens per second.

        Draws stay: whether a token that was drawn is verified must not depend on what it is.
        """
        if draft.survival is None or draft.q is not None or draft.token_probs is not None:
            return draft
        chances = [row for row, most in zip(draft.survival, room, strict=True) if most]
        count = nodes_that_pay(chances, len(room), self.cost, spent, self.advance)
        timed = self.cost.tried(len(room)) is not None  # a plain round to be timed says nothing of this draft
        self.rounds, self.unpaid = self.rounds + 1, self.unpaid + (count == 0 and not timed)
        return cut(draft, [min(length, count) for length in draft.lengths])

    def note(self) -> str:
        """How often nothing was verified, as it would not have paid; empty where that never was."""
        if not self.unpaid:
            return ""
        return (
            f"{self.unpaid} of {self.rounds} drafts were not verified, because too few of their tokens were likely "
            "to be accepted"
        )

    def _bounded(self, draft: Draft) -> Draft:
        """No more than `most_nodes` go to the target. Parents come before children: what is left is a tree, too."""
        most = most_nodes(len(draft.lengths))
        if max(draft.lengths) > most and not self.was_cut:
            self.was_cut = True
            warn(
                f"{self.drafter.name} drafted {max(draft.lengths)} tokens for one row, and the target is fed {most} "
                "of them at most. The text is not affected"
            )
        return cut(draft, [min(length, most) for length in draft.lengths])

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
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
        TypeError: what it has started is none.
    """
    session = drafter.start(context)
    if not isinstance(session, DraftSession):
        raise TypeError(f"{type(drafter).__name__}.start returned {type(session).__name__}, not a DraftSession")
    return session
