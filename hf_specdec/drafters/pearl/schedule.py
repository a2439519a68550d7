"""`PearlSchedule`: carries out the decisions of `overlap` in a call, round by round."""

from collections.abc import Sequence

import torch

from ...clock import now
from ...protocol import Draft, DraftContext, Verdict
from ...schedule import Guarded, Round
from .overlap import Part, Plan, drafted_first, in_step, outcomes, part
from .session import as_draft
from .token import DraftTokens


class PearlSchedule:
    """`PearlDrafter`'s schedule. It gives the worker its orders through the call's guarded session, which only one of a
    target's ranks has: what decides the text comes out of its answers."""

    def __init__(self, session: Guarded, context: DraftContext) -> None:
        self.session, self.context = session, context
        self.carried: dict[int, DraftTokens] = {}
        """by row, what it carries into the next round"""
        self.parts: list[Part] = []
        """[B] of the present round"""
        self.fed_at = 0.0

    def feed(self, round: Round) -> Draft:
        """What the rows carry. Drafting begins behind it. A row without room lets go of what it carries."""
        self.round, alone = round, [Part()] * len(round.room)
        self.parts = alone
        plan: Plan | None = self.session.ask(lambda d: d.plan(len(alone))) if any(round.room) else None
        if plan is not None:
            self.parts = self._parts(plan)
            if any(wanted := [part.wanted for part in self.parts]):
                self._order(plan, wanted, [part.carried for part in self.parts], beside=True)
        if not self.session.alive:
            self.parts = alone
        self.fed_at = now()
        return self._as_draft([part.carried for part in self.parts], tested=False)

    def _parts(self, plan: Plan) -> list[Part]:
        """Each row's part in this round, after a wait for a draft where the plan asks for one."""
        room = self.round.room
        held = [self.carried.get(row, [])[:most] for row, most in zip(self.round.sequences.rows, room, strict=True)]
        if any(first := drafted_first(plan, held, room)):
            self._order(plan, first, held)
            drafted = self.session.ask(lambda d: d.wait(None)) or [[]] * len(held)
            held = [[*chain, *new] for chain, new in zip(held, drafted, strict=True)]
        parts = [part(plan, chain, most) for chain, most in zip(held, room, strict=True)]
        return in_step(parts, self.round.passive) if self.round.lockstep else parts

    def _order(self, plan: Plan, wanted: list[int], carried: Sequence[DraftTokens], beside: bool = False) -> None:
        self.session.ask(lambda d: d.order(self.round.sequences, wanted, carried, plan.corrections, beside))

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        """The carried tokens, and the first token drafted behind each row's, which is waited for."""
        if self.context.device.type == "cuda":
            torch.cuda.current_stream(self.context.device).synchronize()  # the draft may be at work on another
        span, rows = (self.fed_at, now()), len(self.parts)
        drafting = any(part.wanted for part in self.parts)
        fresh = self.session.ask(lambda d: d.wait(1)) if drafting else None
        if fresh:
            self.parts = [part._replace(fresh=new) for part, new in zip(self.parts, fresh, strict=True)]
        if not self.session.alive:  # as if nothing had been drafted
            self.parts = [Part()] * rows
        width, paused = fed.tokens.shape[1] + 1, not any(self.round.room)
        self.session.tell(lambda d: d.saw_target(rows, width, span, drafting, paused))
        tested = [part.tested for part in self.parts]
        if self.round.lockstep:
            width = min(len(chain) for chain, out in zip(tested, self.round.passive, strict=True) if not out)
            tested = [chain[:width] for chain in tested]
        return self._as_draft(tested), [len(part.carried) for part in self.parts]

    def settle(self, verdict: Verdict) -> None:
        """Find out what each row carries into the next round. What it carries is waited for."""
        passed, rejected = outcomes(self.parts, verdict.accepted, verdict.stopped, self.round.lockstep)
        rows, tokens, starts = verdict.rows, verdict.tokens, self.round.sequences.lengths
        corrections = [(rows[b], starts[b] + len(tokens[b]) - 1, tokens[b][-1]) for b in rejected]
        self.carried = self.session.ask(lambda d: d.settle([rows[b] for b in passed], corrections)) or {}

    def _as_draft(self, drafted: Sequence[DraftTokens], tested: bool = True) -> Draft:
        draft = as_draft(drafted, self.context, tested)
        draft.lengths = [0 if out else n for n, out in zip(draft.lengths, self.round.passive, strict=True)]
        return draft
