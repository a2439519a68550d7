"""The overlapped schedule (Liu et al. 2024, Figure 3): the target verifies while the draft model drafts.

A row carries drafted tokens that the target has not seen. In every round the target is fed the row's last accepted
token and those; meanwhile the draft model goes on behind them. The logits then test the unverified tokens and the
first new one:

- none carried (*pre-verify*): the new x1 is tested while x2 … xγ are being drafted;
- x2 … xγ carried (*post-verify*): they and the next x(γ+1) are tested. x1 was tested a round ago, and is not again.

A row that passes all its tests carries its other new tokens on; one that fails carries nothing.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...decoding.guard import GuardedSession
from ...decoding.loop import Decoding, replay
from ...judge.judging import Judge, Judgement, Residual, is_sound
from ...judge.randomness import Purpose
from ...judge.verification import residual
from ...protocol import Draft
from .session import Chain, PearlSession, as_draft

T = TypeVar("T")

DRAWS = (16, 64, 256)
"""sizes of the batches of draws that a correction asks about, before it asks for the whole distribution"""


def _nobody(b: int, node: int) -> None:
    """The judge's own question for q: `CorrectingJudge` asks in its own way."""


class GuardedWorker(GuardedSession):
    """A background session that never raises; what it cannot do any more is None."""

    def ask(self, action: Callable[[PearlSession], T]) -> T | None:
        session: Any = self.session
        return None if session is None else self._guard(lambda: action(session))

    tell = ask
    """the same, for what has no answer"""


def _question(session: GuardedWorker) -> Callable[[int, int, Tensor | None], Tensor | None]:
    return lambda row, column, tokens: session.ask(lambda worker: worker.question(row, column, tokens))


@dataclass
class CorrectingJudge(Judge):
    """After a rejection it asks for q of a few tokens only, not of the whole vocabulary."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """[B] index in the call's batch and accepted columns of the rows that are judged"""
    question: Callable[[int, int, Tensor | None], Tensor | None] = lambda row, column, tokens: None
    """q of these tokens (all where None) at a drafted column; None where nobody can say"""

    def corrected(self, p: Tensor, b: int, node: int, ask: Residual) -> Tensor:
        """All mass on a draw from norm(max(0, p − q)): y from p, taken with probability max(0, 1 − q(y)/p(y))."""
        row, column = self.rows[b], self.starts[b] + node
        mass = p.double().cumsum(-1)
        last = int(p.gt(0).nonzero()[-1])
        attempt = 1  # 0 are the test itself and the draw of the target's own token
        for size in DRAWS:
            attempts = np.arange(attempt, attempt + size)
            u, v = (
                torch.from_numpy(self.randomness.uniform([row], [column], purpose, attempts))
                for purpose in (Purpose.CHOOSE, Purpose.ACCEPT)
            )
            y = torch.searchsorted(mass, u.to(mass.device) * mass[-1], right=True).clamp(max=last)
            q = self.question(row, column, y)
            if q is None:
                return p
            taken = v.to(p.device) * p[y] < p[y] - q.to(p)
            if taken.any():
                return torch.nn.functional.one_hot(y[taken.int().argmax()], len(p)).to(p)
            attempt += size
        q = self.question(row, column, None)
        return p if q is None else residual(p[None], q.to(p)[None])[0]


class OverlappedDecoding(Decoding):
    """`PearlDrafter`'s schedule."""

    guard = GuardedWorker
    session: GuardedWorker | None
    judge: CorrectingJudge

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.judge = CorrectingJudge(**{name: getattr(self.judge, name) for name in Judge.__dataclass_fields__})
        self.carried: dict[int, list[tuple[int, float]]] = {}
        """unverified tokens, by row"""
        self.chains: list[Chain] = []
        """[B] the same in the present round"""
        self.fresh: list[Chain] = []
        """[B] what has been drafted behind them"""
        self.drafting = False
        self.passed: list[int] = []
        """rows (by index in the call's batch) that passed all tests of the round"""
        self.corrected: list[tuple[int, int, int]] = []
        """(row, column, token) of the others' corrections"""

    def play_round(self) -> None:
        """One round of Figure 3, for every row in its own mode."""
        super().play_round()
        self._carry_on()

    def _draft(self, session: Any) -> Draft:
        """What the target is fed; behind it, drafting begins."""
        s = self.sequences
        plan = session.ask(lambda d: d.plan())
        rows = list(s.rows)
        chains = [self.carried.get(row, []) for row in rows]
        room = self._rooms(chains)
        if plan is not None and not plan.pre_verify and any(n > 0 and not c for n, c in zip(room, chains, strict=True)):
            budget = [0 if chain else min(plan.window, n) for n, chain in zip(room, chains, strict=True)]
            began = [list(chain) for chain in chains]
            session.ask(lambda d: d.start_draft(s, budget, began, plan.corrections))
            more = session.ask(lambda d: d.wait(None)) or [[]] * len(rows)
            chains = [chain + new for chain, new in zip(chains, more, strict=True)]
            room = self._rooms(chains)
        budget = [0] * len(rows)
        if plan is not None:
            ahead = [plan.post_verify or not chain for chain in chains]
            if not (plan.pre_verify or plan.post_verify):
                ahead = [False] * len(rows)
            budget = [min(plan.window, max(0, n)) if go else 0 for n, go in zip(room, ahead, strict=True)]
        if not self.ragged:
            # The rows of a lockstep batch are all in one mode.
            active = [b for b, row in enumerate(rows) if not self._passive(row)]
            budget = [min(budget[b] for b in active)] * len(rows)
            width = min(len(chains[b]) for b in active)
            chains = [chain[:width] if b in active else self._padding(width) for b, chain in enumerate(chains)]
        self.drafting = any(budget)
        if self.drafting:
            session.ask(lambda d: d.start_draft(s, budget, chains, plan.corrections, forking=True))
        self.chains = chains if session.session is not None else [[]] * len(rows)
        self.fed_at = time.perf_counter()
        return self._as_draft(self.chains)

    def _rooms(self, chains: list[Chain]) -> list[int]:
        """Tokens that may still be drafted behind each chain: the target's own one needs a place, too."""
        s = self.sequences
        done = [self.finished[row] for row in s.rows]
        left = [self._room(n + len(chain)) for n, chain in zip(s.lengths, chains, strict=True)]
        return [0 if out else n for n, out in zip(left, done, strict=True)]

    def _tested(self, draft: Draft, session: Any) -> Draft:
        """The carried tokens and the first one drafted behind each row's, waited for if need be."""
        if self.call.target.device.type == "cuda":
            torch.cuda.current_stream(self.call.target.device).synchronize()  # the draft may be at work on another
        over = time.perf_counter()
        rows = len(self.chains)
        self.fresh = [[]] * rows
        if self.drafting:
            self.fresh = session.ask(lambda d: d.wait(1)) or self.fresh
        if session.session is None:  # nobody is left to ask for q: as if nothing had been drafted
            self.fresh = self.chains = [[]] * rows
        session.tell(lambda d: d.saw_target(rows, draft.tokens.shape[1] + 1, (self.fed_at, over)))
        self._waited(over)
        if not self.ragged:
            self.fresh = [
                self._padding(len(new)) if self._passive(row) else new
                for row, new in zip(self.sequences.rows, self.fresh, strict=True)
            ]
        return self._as_draft([chain + new[:1] for chain, new in zip(self.chains, self.fresh, strict=True)])

    def _advance(
        self, draft: Draft, logits: Tensor, outputs: Any
    ) -> tuple[list[list[int]], list[int], list[list[int]], bool]:
        """As in the serial schedule, but a row that passes all tests ends in a drafted token, not in one more."""
        if self.session is None:  # the prompt's forward
            return super()._advance(draft, logits, outputs)
        tests = draft.tokens.shape[1]
        real = logits.shape[1]
        fitted = torch.nn.functional.pad(logits, (0, 0, 0, max(0, tests + 1 - real)))[:, : tests + 1]
        self._reserve(tests + 1)
        s = self.sequences
        self.judge.question = _question(self.session)  # not a method: a cycle would keep the caches alive
        self.judge.rows, self.judge.starts = list(s.rows), list(s.lengths)
        before = list(zip(s.rows, map(len, self.chains), self.fresh, strict=True))
        if self.call.processing.opaque:
            steps = itertools.islice(self.judge.stepwise(draft, fitted, s, _nobody), real)
            emitted, accepted = self._advance_lockstep(steps, logits, outputs)
            sound = bool(is_sound(draft, self.vocab))
        else:
            judged, scores, sound = self.judge.block(draft, fitted, s, _nobody)
            if self.ragged:
                drafted = draft.tokens.tolist()
                ends = [
                    Judgement(j.path[:-1], drafted[b][len(j.path) - 1]) if new and len(j.path) == carried + 1 else j
                    for b, (j, (_, carried, new)) in enumerate(zip(judged, before, strict=True))
                ]
                emitted, _ = self._advance_ragged(ends, draft)
                accepted = [min(len(j.path), len(new)) for j, new in zip(judged, emitted, strict=True)]
            else:
                steps = itertools.islice(replay(judged, draft, scores), real)
                emitted, accepted = self._advance_lockstep(steps, logits, outputs)
        self.passed, self.corrected = [], []
        for (row, carried, new), n, tokens, start in zip(before, accepted, emitted, self.judge.starts, strict=True):
            tests = carried + bool(new)
            if self.finished[row]:
                continue
            if new and n == tests:
                self.passed.append(row)
            elif n < tests:
                self.corrected.append((row, start + len(tokens) - 1, tokens[-1]))
        return emitted, accepted, [], sound

    def _carry_on(self) -> None:
        """Rows that passed, and those whose correction was foreseen, wait for what is being drafted behind them."""
        assert self.session is not None
        session, began = self.session, time.perf_counter()
        if not self.ragged and self.corrected and self.passed:  # rows in lockstep go on together or not at all
            self.passed = []
        self.carried = session.ask(lambda d: d.settle(self.passed, self.corrected)) or {}
        self._waited(began)

    def _passive(self, row: int) -> bool:
        """Whether a row of a lockstep batch is fed padding, as in plain decoding."""
        return self.finished[row] and self.stopping.has_eos

    def _padding(self, width: int) -> Chain:
        return [(self.call.pad_token_id, 1.0)] * width

    def _as_draft(self, chains: list[Chain]) -> Draft:
        assert self.session is not None
        draft = as_draft(chains, self.session.context)
        passive = [not self.ragged and self._passive(row) for row in self.sequences.rows]
        draft.lengths = [0 if out else n for n, out in zip(draft.lengths, passive, strict=True)]
        return draft

    def _waited(self, since: float) -> None:
        """Time in which the target stood still for the draft."""
        assert self.session is not None
        seconds = time.perf_counter() - since
        self.stats.draft_seconds += seconds
        self.session.tell(lambda d: d.timeline.add_wait(seconds))
