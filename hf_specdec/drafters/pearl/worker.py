"""The worker: drafts in a thread of its own and answers questions meanwhile.

It runs in a thread of the target's process (`serve`) or in a process of its own (`main`); the line is the same.
"""

import os
import queue
import socket
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...judge.picking import DraftPicker
from ...protocol import DraftContext, Sequences
from ...stats import SpeculationStats
from ..draft_model import DraftModelSession
from .link import Fork, Kind, Link, Order, Step, decode_numbers, decode_object, encode_forks, encode_numbers

BLOCK = 256
"""columns by which the buffer of token ids grows"""
GRACE = 5.0
"""seconds for a draft step that has become useless to end"""


@dataclass
class Setup:
    """What a session tells its worker, once."""

    prompt_ids: Tensor
    """[B, P] left-padded, on the CPU"""
    prompt_mask: Tensor
    max_length: int
    eos_token_ids: frozenset[int]
    lockstep: bool
    picker: DraftPicker
    """It draws each position's draft with one number, however often it is drafted: only the last draft of a position
    is ever tested, and nothing else depends on the others. So a seeded text depends on no fixed window, no timing."""


class CancelledError(Exception):
    """The present order has become useless."""


@dataclass
class Line:
    """A text that is drafted behind: a row's own, or one with a correction in it."""

    row: int
    q: dict[int, Tensor] = field(default_factory=dict)
    """[V] by drafted column"""
    others: dict[int, list[int]] = field(default_factory=dict)
    """by drafted column, the likeliest tokens besides the drafted one"""


class BackgroundDraft(DraftModelSession):
    """The draft model's session, told what to draft behind and telling every token as soon as it is drawn.

    Besides each row's own text it drafts behind *forks* of it, the corrections that the target is likely to make: at
    each place that has not been verified, what the draft thinks likeliest next to what it drafted. All lines, the
    rows' own first, share the draft's steps.
    """

    def __init__(self, setup: Setup, model: PreTrainedModel, link: Link, desk: "Desk") -> None:
        self.link, self.desk, self.epoch = link, desk, -1
        self.began, self.sent = 0.0, 0
        self.picker = setup.picker
        self.picker.device = model.device
        for processor in self.picker.processing.processors:
            for name, value in vars(processor).items():
                if isinstance(value, Tensor):
                    setattr(processor, name, value.to(model.device))
        context = DraftContext(
            prompt_ids=setup.prompt_ids.to(model.device),
            prompt_mask=setup.prompt_mask.to(model.device),
            max_length=setup.max_length,
            vocab_size=self.picker.vocab,
            eos_token_ids=setup.eos_token_ids,
            do_sample=self.picker.do_sample,
            lockstep=setup.lockstep,
            trees=False,
            pick=self.picker,
            device=model.device,
            stats=SpeculationStats(),
        )
        super().__init__(context, model, window=1)
        self.ids = torch.nn.functional.pad(context.prompt_ids, (0, BLOCK))
        self.lines = [Line(row) for row in self.rows]
        self.ends: list[int] = []
        """[L] columns of each line"""

    def follow(self, order: Order) -> None:
        """Draft `order.width` tokens behind each row, or fewer where the draft's context ends."""
        self.epoch, self.sent, self.began = order.epoch, 0, time.perf_counter()
        ends = [keep + len(tail) for keep, tail in zip(order.keeps, order.tails, strict=True)]
        width = min(order.width, self.context_limit - max(ends))
        lines = [self.lines[i] for i in order.lines]
        self._take_up(order, ends, self._foreseen(order, lines, ends, order.unverified, 0) if width > 0 else [])
        if width < 1:
            return
        logits = self._catch_up(Sequences(self.ids, self.ends, self.rows, []))
        for step in range(width):
            tokens, probs = self._draw(logits, order.corrections)
            if step == 0 and width > 1:
                self._fork(self._foreseen(order, self.lines[: len(ends)], self.ends, [1] * len(ends), 1))
            self._tell(tokens, probs)
            if step + 1 < width:
                logits = self._step(self.ids.gather(1, torch.tensor(self.ends, device=self.ids.device)[:, None] - 1))

    def _foreseen(
        self, order: Order, lines: list[Line], ends: list[int], unverified: list[int], first: int
    ) -> list[tuple[int, Fork]]:
        """The likely corrections of each row's last, unverified tokens, each with the row's line; they are told."""
        forks = []
        for b, (line, end, most, budget) in enumerate(zip(lines, ends, unverified, order.budgets, strict=False)):
            for column in range(end - most, end) if budget and order.forking else ():
                for token in line.others.get(column, []):
                    if token not in self.context.eos_token_ids:
                        forks.append((b, Fork(line.row, column, token, first)))
        if forks:
            self.link.send(Kind.FORKS, encode_forks(order.epoch, [fork for _, fork in forks]))
        return forks

    def _take_up(self, order: Order, ends: list[int], forks: list[tuple[int, Fork]]) -> None:
        """Each row goes on from a line of the last order, and forks from there; the other lines are forgotten."""
        came_from = [*range(len(ends)), *(b for b, _ in forks)]
        self._select([order.lines[b] for b in came_from])
        missing = max(ends) + order.width + 1 - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))
        for i, b in enumerate(came_from):
            if order.tails[b]:
                self.ids[i, order.keeps[b] : ends[b]] = torch.tensor(order.tails[b], device=self.ids.device)
        for line, end, most in zip(self.lines, ends, order.unverified, strict=False):
            line.q = {column: q for column, q in line.q.items() if end - most <= column < end}
            line.others = {column: tokens for column, tokens in line.others.items() if end - most <= column < end}
        self.ends = list(ends)
        self._correct([fork for _, fork in forks], [order.keeps[b] for b in came_from])

    def _fork(self, forks: list[tuple[int, Fork]]) -> None:
        """Open lines for corrections in the lines that there are."""
        if forks:
            self._select([*range(len(self.lines)), *(b for b, _ in forks)])
            self._correct([fork for _, fork in forks], self.runner.lengths)

    def _correct(self, forks: list[Fork], held: list[int]) -> None:
        """Write the forks' corrections into the last lines. Of each line's text the cache holds at most `held`, and
        the last token is always fed."""
        first = len(self.lines) - len(forks)
        self.ends += [fork.column + 1 for fork in forks]
        if forks:
            lines, columns = list(range(first, len(self.lines))), [fork.column for fork in forks]
            self.ids[lines, columns] = torch.tensor([fork.token for fork in forks], device=self.ids.device)
        lengths = zip(self.runner.lengths, held, self.ends, strict=True)
        self.good = [min(length, most, end - 1) for length, most, end in lengths]
        if self.context.lockstep:
            self.good = [min(self.good)] * len(self.good)
        if self.runner.lengths != self.good:
            self.runner.truncate(self.good)

    def _select(self, lines: list[int]) -> None:
        """Go on with these lines; one that is there a second time is a fork."""
        if lines == list(range(len(self.lines))):
            return
        self.runner.select(lines)
        self.ids = self.ids[lines]
        self.rows = [self.rows[i] for i in lines]
        self.lines = [Line(self.lines[i].row) if i in lines[:n] else self.lines[i] for n, i in enumerate(lines)]

    def _step(self, tokens: Tensor, counts: list[int] | None = None) -> Tensor:
        if self.desk.cancelled >= self.epoch:
            raise CancelledError
        return super()._step(tokens, counts)

    def _draw(self, logits: Tensor, others: int) -> tuple[list[int], list[float] | None]:
        """The next token of every line, and its q where it was drawn at random."""
        scores = self.picker.scores(self.ids, self.ends, logits)
        drawn, q = self.picker.pick(self.ends, self.rows, scores)
        self.ids.scatter_(1, torch.tensor(self.ends, device=self.ids.device)[:, None], drawn[:, None])
        tokens = drawn.tolist()
        best = scores.topk(min(others + 1, scores.shape[1])).indices.tolist() if others else [[]] * len(tokens)
        for b, (line, column) in enumerate(zip(self.lines, self.ends, strict=True)):
            line.others[column] = [token for token in best[b] if token != tokens[b]][:others]
            if q is not None:
                line.q[column] = q[b].clone()  # without the other lines'
        self.ends = [end + 1 for end in self.ends]
        return tokens, None if q is None else q.gather(1, drawn[:, None])[:, 0].tolist()

    def _tell(self, tokens: list[int], probs: list[float] | None) -> None:
        now = time.perf_counter()
        step = Step(self.epoch, self.context.stats.draft_calls, self.began, now, tokens, probs)
        self.link.send(Kind.STEP, step.encode())
        self.began, self.sent = now, self.sent + 1

    def answer(self, line: int, column: int, tokens: list[int]) -> bytes:
        """float32 q of these tokens (all, where none are named) at a drafted position of a line."""
        q = self.lines[line].q[column]
        return (q[tokens] if tokens else q).float().cpu().numpy().astype("<f4").tobytes()


@dataclass
class Desk:
    """What the two threads of a worker share."""

    session: BackgroundDraft | None = None
    cancelled: int = -1
    """orders up to this epoch are useless"""


def serve(link: Link, model: PreTrainedModel | None = None) -> None:
    """Read the line until the other side hangs up; a second thread drafts, so that questions never wait for it."""
    desk, orders = Desk(), queue.SimpleQueue[Any]()
    drafting: threading.Thread | None = None

    def begin(model: PreTrainedModel) -> threading.Thread:
        thread = threading.Thread(target=_draft, args=(link, model, desk, orders), daemon=True, name="hf_specdec draft")
        thread.start()
        return thread

    try:
        drafting = begin(model) if model is not None else None
        while True:
            message = link.receive()
            assert message is not None
            kind, body = message
            if kind is Kind.MODEL:
                drafting = begin(decode_object(body))
                link.send(Kind.READY)
            elif kind is Kind.CANCEL:
                desk.cancelled = max(desk.cancelled, *decode_numbers(body))
            elif kind is Kind.ASK:
                line, column, *tokens = decode_numbers(body)
                assert desk.session is not None
                with torch.no_grad():
                    link.send(Kind.ANSWER, desk.session.answer(line, column, tokens))
            else:
                orders.put((kind, body))
    except OSError:
        pass  # the other side has hung up: there is nobody to tell
    except Exception as error:
        _tell(link, error)
    finally:
        desk.cancelled = 2**62
        orders.put(None)
        if drafting is not None:
            drafting.join(GRACE)
        link.close()


def _draft(link: Link, model: PreTrainedModel, desk: Desk, orders: "queue.SimpleQueue[Any]") -> None:
    """The drafting thread. Gradient mode and CUDA streams are thread-local."""
    on_gpu = model.device.type == "cuda"
    stream = torch.cuda.stream(torch.cuda.Stream(model.device)) if on_gpu else nullcontext()
    try:
        with torch.no_grad(), stream:
            while (item := orders.get()) is not None:
                kind, body = item
                if kind is Kind.OPEN:
                    desk.session = BackgroundDraft(decode_object(body), model, link, desk)
                elif kind is Kind.CLOSE:
                    desk.session = None
                elif desk.session is not None:
                    order = Order.decode(body)
                    try:
                        desk.session.follow(order)
                    except CancelledError:
                        continue
                    link.send(Kind.DONE, encode_numbers(order.epoch, desk.session.sent))
    except OSError:
        pass
    except Exception as error:
        _tell(link, error)


def _tell(link: Link, error: Exception) -> None:
    with suppress(OSError):  # nobody may be left to tell
        link.send(Kind.ERROR, repr(error).encode())


def main(fileno: int, threads: int) -> None:
    """A process of its own: ended by its owner, or by the end of the line when the owner dies."""
    torch.set_num_threads(threads)
    serve(Link(socket.socket(fileno=fileno)))
    os._exit(0)
