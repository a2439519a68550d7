"""`Overlapped`: carries out the decisions of `overlap` in a call, round by round."""

import torch
from torch import Tensor

from ...clock import now
from ...protocol import Draft, DraftContext, Verdict
from ...schedule import Correct, Guarded, Round
from ...verify.picking import DraftPicker
from .correction import corrected
from .overlap import NO_TURN, Chain, Mode, Outcome, Plan, Turn, drafted_first, in_step, together, turn
from .session import as_draft


class Overlapped:
    """`PearlDrafter`'s schedule. It gives the worker its orders through the call's guarded session."""

    def __init__(self, session: Guarded, context: DraftContext) -> None:
        self.session, self.context = session, context
        assert isinstance(context.pick, DraftPicker)
        self.randomness = context.pick.randomness
        self.carried: dict[int, Chain] = {}
        """by row, what it carries into the next round"""
        self.turns: list[Turn] = []
        """[B] of the present round"""
        self.fresh: list[Chain] = []
        """[B] what has been drafted behind the carried tokens"""
        self.drafting = False
        """whether anything is being drafted while the target verifies"""
        self.fed_at = 0.0

    def feed(self, round: Round) -> Draft:
        """What the rows carry. Drafting begins behind it. A row without room lets go of what it carries."""
        self.round, self.rows, self.starts = round, list(round.sequences.rows), list(round.sequences.lengths)
        rows, self.turns, self.drafting = len(self.rows), [NO_TURN] * len(self.rows), False
        plan: Plan | None = self.session.ask(lambda d: d.plan(rows)) if any(round.room) else None
        if plan is not None:
            self.turns = self._turns(plan)
            self.drafting = any(turn.mode is not Mode.SERIAL for turn in self.turns)
            if self.drafting:
                self._order(plan, [turn.wanted for turn in self.turns], beside=True)
        if not self.session.alive:
            self.turns = [NO_TURN] * rows
        self.fed_at = now()
        return self._as_draft([turn.carried for turn in self.turns])

    def _turns(self, plan: Plan) -> list[Turn]:
        """Each row's part in this round, after a wait for a draft where the plan asks for one."""
        room = self.round.room
        carried = [self.carried.get(row, [])[:most] for row, most in zip(self.rows, room, strict=True)]
        self.turns = [Turn(chain, 0) for chain in carried]
        first = drafted_first(plan, carried, room)
        if any(first):
            self._order(plan, first)
            drafted = self.session.ask(lambda d: d.wait(None)) or [[] for _ in carried]
            carried = [chain + new for chain, new in zip(carried, drafted, strict=True)]
        turns = [turn(plan, chain, most) for chain, most in zip(carried, room, strict=True)]
        return in_step(turns, self.round.passive) if self.round.lockstep else turns

    def _order(self, plan: Plan, wanted: list[int], beside: bool = False) -> None:
        carried = [turn.carried for turn in self.turns]
        self.session.ask(lambda d: d.order(self.round.sequences, wanted, carried, plan.corrections, beside))

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        """The carried tokens, and the first token drafted behind each row's, which is waited for."""
        if self.context.device.type == "cuda":
            torch.cuda.current_stream(self.context.device).synchronize()  # the draft may be at work on another
        over, rows = now(), len(self.turns)
        self.fresh = [[]] * rows
        if self.drafting:
            self.fresh = self.session.ask(lambda d: d.wait(1)) or self.fresh
        if not self.session.alive:  # nobody is left to ask for q: as if nothing had been drafted
            self.fresh, self.turns = [[]] * rows, [NO_TURN] * rows
        span, width = (self.fed_at, over), fed.tokens.shape[1] + 1
        alone, paused = not self.drafting, not any(self.round.room)
        self.session.tell(lambda d: d.saw_target(rows, width, span, alone, paused))
        self._waited(over)
        tested = [turn.tested(new) for turn, new in zip(self.turns, self.fresh, strict=True)]
        if self.round.lockstep:
            width = min(len(chain) for chain, out in zip(tested, self.round.passive, strict=True) if not out)
            tested = [chain[:width] for chain in tested]
        return self._as_draft(tested), [len(turn.carried) for turn in self.turns]

    @property
    def correct(self) -> Correct | None:
        return self._correct

    def _correct(self, p: Tensor, b: int, node: int) -> Tensor:
        likely = self.turns[b].tested(self.fresh[b])[node].likely
        assert likely is not None  # a draft that does not sample is corrected by nobody
        found = corrected(p, self.rows[b], self.starts[b] + node, self.randomness, likely, self._question)
        if found is None:
            self.context.stats.uncorrected_tokens += 1
        return p if found is None else found

    def _question(self, row: int, column: int, tokens: Tensor | None) -> Tensor | None:
        return self.session.ask(lambda d: d.question(row, column, tokens))

    def settle(self, verdict: Verdict) -> None:
        """Find out what each row carries into the next round. What it carries is waited for."""
        began = now()
        rounds = zip(self.turns, self.fresh, verdict.accepted, verdict.stopped, strict=True)
        outcomes = [turn.outcome(fresh, accepted, stopped) for turn, fresh, accepted, stopped in rounds]
        outcomes = together(outcomes) if self.round.lockstep else outcomes
        passed: list[int] = []
        corrections: list[tuple[int, int, int]] = []
        for row, start, tokens, outcome in zip(verdict.rows, self.starts, verdict.tokens, outcomes, strict=True):
            if outcome is Outcome.PASSED:
                passed.append(row)
            elif outcome is Outcome.REJECTED:
                corrections.append((row, start + len(tokens) - 1, tokens[-1]))
        self.carried = self.session.ask(lambda d: d.settle(passed, corrections)) or {}
        self._waited(began)

    def _as_draft(self, chains: list[Chain]) -> Draft:
        draft = as_draft(chains, self.context)
        draft.lengths = [0 if out else n for n, out in zip(draft.lengths, self.round.passive, strict=True)]
        return draft

    def _waited(self, since: float) -> None:
        """Record that the target has stood still for the draft since then."""
        seconds = now() - since
        self.session.tell(lambda d: d.timeline.add_wait(seconds))
