"""`PearlSession`: the target's side of drafting in the background."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...clock import Deadline
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...transfer import to_device
from ...verify.picking import DraftPicker
from .background import Setup
from .copying import Chain, Copying, as_likely_as, faster_than
from .link import Fork, Kind, Order, Step, decode_forks, decode_numbers, encode_numbers, encode_object
from .timeline import Timeline
from .window import Plan, Planner
from .workers import Worker

SHORT = 4
"""rounds of a call that say nothing yet: the last one has no room for a draft anyway"""


class PearlSession(DraftSession):
    """Gives a worker its orders and collects what it drafts, step by step."""

    patience = 30.0

    def __init__(
        self,
        context: DraftContext,
        worker: Worker,
        planner: Planner,
        timeline: Timeline,
        release: Callable[[], None],
        forks: bool = False,
        copying: Copying | None = None,
    ) -> None:
        """
        Args:
            copying: where rows that carry nothing may copy.
            forks: whether the draft takes rows of uneven lengths, as drafting for corrections needs.
            release: called once at the end, when the worker is free and sound; otherwise it is closed.
        """
        super().__init__(context)
        rows = context.prompt_ids.shape[0]
        self.forks_can_be = forks and (rows == 1 or not context.lockstep)
        self.worker, self.planner, self.timeline, self.release = worker, planner, timeline, release
        self.copying = copying
        self.weighs = planner.window != "auto"  # a fixed window is kept whatever it costs
        self.columns = context.prompt_ids.shape[1]
        self.told: dict[int, list[int]] = {row: [] for row in range(rows)}
        """per row, the new tokens that the worker knows: accepted ones and its own drafts"""
        self.accepted: dict[int, int] = dict.fromkeys(self.told, 0)
        """per row, how many of them were accepted when they were last told: these never change"""
        self.sound = True
        self.steps: list[Step] = []
        self.forks: list[Fork] = []
        self.rows: list[int] = list(self.told)
        self.next_lines = {row: line for line, row in enumerate(self.told)}
        """per row, the line of the present order that the next one goes on from"""
        self.forking = self.beside = False
        """of the present order: whether it drafts behind corrections, and while the target verifies"""
        self.budget: list[int] = []
        self.total: int | None = 0
        """draft steps of the present order, once it is known that no more will come"""
        self.link_before = (worker.link.messages, worker.link.bytes)
        assert isinstance(context.pick, DraftPicker)
        self.paused = [0, 0]
        """rounds in which drafting went on, and those in which it was paused"""
        setup = Setup(
            context.prompt_ids.cpu(),
            context.prompt_mask.cpu(),
            context.max_length,
            context.eos_token_ids,
            context.lockstep and not self.forks_can_be,
            _autocast(),
            context.pick,
        )
        self._setup: bytes | None = encode_object(setup, on_host=True)
        """what the worker has not been told yet"""
        if not planner.resting:  # it reads the prompt while the target does
            self._open()

    def _open(self) -> None:
        """Have the worker read the prompt, once. Where drafting rested it would be in vain in most calls."""
        if self._setup is not None:
            self.worker.link.send(Kind.OPEN, self._setup)
            self._setup = None

    # ------------------------------------------------------------------ orders

    def start_draft(
        self,
        sequences: Sequences,
        budget: list[int],
        pending: list[Chain] | None = None,
        corrections: int = 0,
        beside: bool = False,
    ) -> None:
        """Have the worker draft `budget[b]` tokens behind each row's accepted tokens and `pending`, unverified ones.

        Args:
            corrections: how many likely ones of each token to remember.
            beside: the target verifies meanwhile: draft behind the corrections of unverified tokens, too.
        """
        self._open()
        corrections = corrections if self.forks_can_be else 0
        ahead = pending or [[] for _ in sequences.rows]
        keeps, tails = [], []
        for b, row in enumerate(sequences.rows):
            told, sure = self.told[row], self.accepted[row]
            new = sequences.lengths[b] - self.columns
            text = sequences.tokens[b][len(sequences.tokens[b]) - (new - sure) :] if new > sure else []
            text = text + [token for token, _ in ahead[b]]
            same = _common(told, sure, text)
            keeps.append(self.columns + sure + same)
            tails.append(text[same:])
            told[sure + same :] = text[same:]
            self.accepted[row] = new
        self.worker.epoch += 1
        self.steps, self.forks, self.total = [], [], None
        self.rows, self.budget, self.base = list(sequences.rows), list(budget), list(sequences.lengths)
        self.forking, self.beside = beside and corrections > 0, beside
        order = Order(
            epoch=self.worker.epoch,
            width=max(budget),
            corrections=corrections,
            forking=self.forking,
            rows=self.rows,
            lines=[self.next_lines[row] for row in self.rows],
            keeps=keeps,
            budgets=self.budget,
            unverified=[len(chain) for chain in ahead],
            tails=tails,
        )
        self.next_lines = {row: line for line, row in enumerate(self.rows)}
        self.worker.link.send(Kind.DRAFT, order.encode())

    def wait(self, steps: int | None) -> list[Chain]:
        """What was drafted, per row, once this many steps are there (None: all of them).

        Raises:
            ConnectionError: the worker is gone or answers garbage.
            TimeoutError: it is silent.
        """
        with self._listening():
            while self.total is None and (steps is None or len(self.steps) < steps):
                self._hear_of_draft()
            return [self._line(b, most=most) for b, most in enumerate(self.budget)]

    def settle(self, passed: list[int], corrected: list[tuple[int, int, int]]) -> dict[int, Chain]:
        """What each row carries into the next round, once it is there. Drafting that is of no use to any is cancelled.

        Args:
            passed: rows that passed all their tests; they carry their new tokens but the first, which was tested.
            corrected: (row, column, token) of the others' corrections, which may have been drafted for.
        """
        forks = {(fork.row, fork.column, fork.token): i for i, fork in enumerate(self.forks)}
        hits = {place[0]: forks[place] for place in corrected if place in forks}
        self.timeline.corrections.append((len(corrected), len(hits)))
        if self.forking:
            self.planner.history.saw_corrections(len(corrected), len(hits))
        if not passed and not hits:
            self.cancel(self.rows)
            self.forks, self.forking = [], False  # the next round may do without an order
            return {}
        chains = dict(zip(self.rows, self.wait(None), strict=True))
        return {row: chains[row][1:] for row in passed} | {row: self._go_on_from(i) for row, i in hits.items()}

    def _go_on_from(self, index: int) -> Chain:
        """What was drafted behind a correction, which the target has made."""
        fork, line = self.forks[index], len(self.rows) + index
        chain = self._line(line, fork.first)
        self.told[fork.row][fork.column - self.columns :] = [fork.token, *(token for token, _ in chain)]
        self.next_lines[fork.row] = line
        return chain[: self.budget[self.rows.index(fork.row)] - fork.first]  # it ends where the row's own line does

    def _line(self, line: int, first: int = 0, most: int | None = None) -> Chain:
        steps = self.steps[first:most]
        return [(s.tokens[line], s.token_probs[line] if s.token_probs else 1.0) for s in steps]

    def cancel(self, rows: list[int]) -> None:
        """Stop drafting, between two steps, when it has become useless for all rows."""
        if self.total is None and set(rows) >= set(self.rows):
            self.worker.link.send(Kind.CANCEL, encode_numbers(self.worker.epoch))
            self.total = len(self.steps)

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        """q of some tokens, or all; nodes are counted from the accepted tokens at the time of the last order."""
        return self.question(self.rows[row], self.base[row] + node, tokens)

    def question(self, row: int, column: int, tokens: Tensor | None = None) -> Tensor:
        """q of some tokens, or all, at a drafted column of a row of the call's batch."""
        wanted = [] if tokens is None else tokens.tolist()
        with self._listening():
            self.worker.link.send(Kind.ASK, encode_numbers(self.next_lines[row], column, *wanted))
            q = np.frombuffer(self._hear_answer(), "<f4")
            if len(q) != (len(wanted) or self.context.vocab_size) or not ((q >= 0) & (q <= 1.0001)).all():
                raise ConnectionError(f"the draft worker answered garbage: {len(q)} probabilities from {q.min()} on")
        return torch.from_numpy(q.copy()).to(self.context.device)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Whatever ends the block early, Ctrl-C too, leaves answers behind on the line."""
        self.sound = False
        yield
        self.sound = True

    def _hear_of_draft(self) -> None:
        """The present order's next step, or its end."""
        deadline, before = Deadline(self.patience), len(self.steps)
        while self.total is None and len(self.steps) == before:
            self._hear(deadline)

    def _hear_answer(self) -> bytes:
        deadline = Deadline(self.patience)
        while (message := self._hear(deadline))[0] is not Kind.ANSWER:
            pass
        return message[1]

    def _hear(self, deadline: Deadline) -> tuple[Kind, bytes]:
        """The next message, taken in; what was drafted for older orders is passed over."""
        message = None if deadline.over else self.worker.link.receive(deadline.left)
        if message is None:
            raise TimeoutError(f"the draft worker gave no usable answer for {self.patience} seconds")
        kind, body = message
        if kind is Kind.ERROR:
            raise RuntimeError(f"the draft worker raised {body[:1000].decode(errors='replace')}")
        if kind is Kind.STEP:
            self._take_step(body)
        elif kind is Kind.FORKS:
            self._take_forks(body)
        elif kind is Kind.DONE:
            epoch, steps = [*decode_numbers(body), 0, 0][:2]
            if epoch == self.worker.epoch and self.total is None:
                self.total = steps
        return message

    def _take_forks(self, body: bytes) -> None:
        if _epoch(body) == self.worker.epoch:
            self.forks += decode_forks(body)
            if self.steps or not self.forking or any(fork.first not in (0, 1) for fork in self.forks):
                raise ConnectionError("the draft worker answered garbage: forks that nobody asked for")

    def _take_step(self, body: bytes) -> None:
        lines = len(self.rows) + sum(fork.first <= len(self.steps) for fork in self.forks)
        step = Step.decode(body, lines) if _epoch(body) == self.worker.epoch else None
        if step is None or self.total is not None:
            return
        vocab = self.context.vocab_size
        fine = all(0 <= token < vocab for token in step.tokens)
        if self.context.do_sample:
            fine = fine and step.token_probs is not None and all(0 < q <= 1.0001 for q in step.token_probs)
        if not fine or len(self.steps) == max(self.budget):
            raise ConnectionError("the draft worker answered garbage: token ids, probabilities or steps out of range")
        self.steps.append(step)
        self.context.stats.draft_calls = step.draft_calls
        self.timeline.draft.append((step.began, step.ended))
        alone, forking = not self.beside, lines > len(self.rows)
        self.planner.saw_draft(len(self.rows), step.ended - step.began, forking, alone)
        for b, row in enumerate(self.rows):
            if len(self.steps) <= self.budget[b]:
                self.told[row].append(step.tokens[b])

    # ------------------------------------------------------------------ the rest of a session

    def copy(self, chains: list[Chain], sequences: Sequences, room: list[int], plan: Plan) -> list[Chain]:
        """Copies for the rows that carry nothing: as much as is as likely to be kept as a draft token, so that what is
        drafted behind it is of as much use as without it. Where nobody drafts meanwhile, what promises more tokens per
        second than waiting for a draft."""
        assert self.copying is not None
        if plan.post_verify:
            return self.copying.copy(chains, sequences, room, as_likely_as(self.planner.history.acceptance))
        verify_time, _ = self.planner.one_after_the_other(len(chains))
        faster = faster_than(plan.speed, verify_time, self.context.lockstep)
        return self.copying.copy(chains, sequences, room, faster)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        """Draft and wait: the serial schedule, and transformers' own loop."""
        window = self.planner.plan(len(budget)).window
        self.start_draft(sequences, [min(window, most) for most in budget])
        return as_draft(self.wait(None), self.context)

    def saw_target(self, rows: int, width: int, span: tuple[float, float], alone: bool, paused: bool) -> None:
        """A forward of the target, of `width` tokens per row; alone, if nothing was drafted meanwhile."""
        self.paused[paused] += 1
        self.planner.saw_target(rows, width, span[1] - span[0], alone)
        self.timeline.target.append(span)

    def observe(self, verdict: Verdict) -> None:
        self.timeline.tests.append((sum(verdict.drafted), sum(verdict.accepted)))
        tested, accepted = verdict.drafted, verdict.accepted
        if self.copying is not None:
            tested, accepted = self.copying.observe(verdict)
        self.planner.history.saw_tests(verdict.rows, tested, accepted)

    def close(self) -> None:
        """Free the worker, or end it if it may be in trouble."""
        self.planner.history.end_texts()
        if self.planner.window == "auto" and sum(self.paused) > SHORT:
            self.planner.resting = self.paused[True] > self.paused[False]
        link = self.worker.link
        self.timeline.messages += link.messages - self.link_before[0]
        self.timeline.bytes += link.bytes - self.link_before[1]
        try:
            if not (self.sound and link.whole):
                raise ConnectionError("the line is not clean")
            link.send(Kind.CANCEL, encode_numbers(self.worker.epoch))
            link.send(Kind.CLOSE)
        except OSError:
            self.worker.close()
        else:
            self.release()


def _autocast() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def as_draft(chains: list[Chain], context: DraftContext) -> Draft:
    """A draft of uneven chains."""
    draft = Draft.from_lists([[token for token, _ in chain] for chain in chains], context.device)
    if context.do_sample:
        width = draft.tokens.shape[1]
        q = [[q for _, q in chain] + [1.0] * (width - len(chain)) for chain in chains]
        draft.token_probs = to_device(q, context.device, torch.float32).view(len(chains), width)
    return draft


def _common(told: list[int], start: int, text: list[int]) -> int:
    """How many leading tokens of `text` are those of `told` from `start` on."""
    n = 0
    for a, b in zip(text, told[start:], strict=False):
        if a != b:
            break
        n += 1
    return n


def _epoch(body: bytes) -> int:
    return int(np.frombuffer(body, "<i8", 1)[0]) if len(body) >= 8 else -1
