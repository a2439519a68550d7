"""The worker: drafts in a thread of its own and answers questions meanwhile.

It runs in a thread of the target's process (`serve`) or in a process of its own (`main`); the line is the same.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...picking import DraftPicker
from ...stats import SpeculationStats
from ..base import DraftContext, Sequences
from ..draft_model import DraftModelSession
from .link import Kind, Link, Order, Step, decode_numbers, decode_object, encode_numbers

BLOCK = 256
"""columns by which the buffer of token ids grows"""


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


class BackgroundDraft(DraftModelSession):
    """The draft model's session, told what to draft behind and telling every token as soon as it is drawn."""

    def __init__(self, setup: Setup, model: PreTrainedModel, link: Link, desk: "Desk") -> None:
        self.link, self.desk, self.order = link, desk, Order(-1, 0, [], [], [], [])
        self.began, self.sent = 0.0, 0
        self.q_at: dict[tuple[int, int], Tensor] = {}
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
            pick=self._pick,
            device=model.device,
            stats=SpeculationStats(),
        )
        super().__init__(context, model, window=1)
        self.ids = torch.nn.functional.pad(context.prompt_ids, (0, BLOCK))

    def follow(self, order: Order) -> None:
        """Draft `order.width` tokens behind each row, or fewer where the draft's context ends."""
        self.order, self.sent, self.began = order, 0, time.perf_counter()
        if order.rows != self.rows:
            self.ids = self.ids[[self.rows.index(row) for row in order.rows]]
        lengths = [keep + len(tail) for keep, tail in zip(order.keeps, order.tails, strict=True)]
        missing = max(lengths) + order.width - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))
        for b, (keep, tail) in enumerate(zip(order.keeps, order.tails, strict=True)):
            self.ids[b, keep : keep + len(tail)] = torch.tensor(tail, dtype=torch.long)
        self._trust(order, lengths)
        ends = dict(zip(order.rows, lengths, strict=True))
        self.q_at = {(row, column): q for (row, column), q in self.q_at.items() if column < ends.get(row, 0)}
        self.propose(Sequences(self.ids, lengths, order.rows, []), order.budgets)

    def _trust(self, order: Order, lengths: list[int]) -> None:
        """What the cache holds of each row's new text; the last token is fed again where it holds all."""
        good = dict(zip(self.rows, self.runner.lengths, strict=True))
        for row, keep, length in zip(order.rows, order.keeps, lengths, strict=True):
            good[row] = min(good[row], keep, length - 1)
        self.good = [good[row] for row in self.rows]
        if self.context.lockstep:
            self.good = [min(self.good)] * len(self.good)

    def window(self) -> int:
        return self.order.width

    def _step(self, tokens: Tensor, counts: list[int] | None = None) -> Tensor:
        if self.desk.cancelled >= self.order.epoch:
            raise CancelledError
        return super()._step(tokens, counts)

    def _pick(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        tokens, q = self.picker(ids, lengths, rows, logits)
        ids.scatter_(1, torch.tensor(lengths, device=ids.device)[:, None], tokens[:, None])
        probs = None
        if q is not None:
            self.q_at.update({(row, n): q[b] for b, (row, n) in enumerate(zip(rows, lengths, strict=True))})
            probs = q.gather(1, tokens[:, None])[:, 0].tolist()
        drawn = tokens.tolist()
        now = time.perf_counter()
        step = Step(self.order.epoch, self.context.stats.draft_calls, self.began, now, drawn, probs)
        self.link.send(Kind.STEP, step.encode())
        self.began, self.sent = now, self.sent + 1
        return tokens, q

    def answer(self, row: int, column: int, tokens: list[int]) -> bytes:
        """float32 q of these tokens (all, where none are named) at a drafted position."""
        q = self.q_at[row, column]
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
                row, column, *tokens = decode_numbers(body)
                assert desk.session is not None
                with torch.no_grad():
                    link.send(Kind.ANSWER, desk.session.answer(row, column, tokens))
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
            drafting.join()
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
