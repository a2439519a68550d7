"""`Conversation`: what one call tells its worker, and what it is told. Every answer is checked before it is used."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ....clock import Deadline
from .wire import Fork, Kind, Order, Setup, Step, decode_probabilities, encode, epoch_of, garbage
from .workers import Worker


class Conversation:
    """The session's side of a call: draft on, answer for a correction, stop.

    What is waited for may raise:
        ConnectionError: the worker is gone or answers garbage.
        TimeoutError: it is silent.
        RuntimeError: the draft model raised.
    """

    def __init__(self, worker: Worker, setup: Setup, patience: float) -> None:
        """
        Args:
            patience: seconds to wait for an answer, and for a message to be taken.
        """
        self.worker, self.link, self.patience = worker, worker.link, patience
        self.link.limit(patience)
        self.vocab, self.do_sample = setup.picker.vocab, setup.picker.do_sample
        self.before = (self.link.messages, self.link.bytes)
        self._setup: bytes | None = encode(setup, on_host=True)
        """what the worker has not been told yet"""
        self.sound = True
        """False once an answer was not waited for to its end: what is left of it would be taken for the next one's"""
        self.order: Order | None = None
        """the present one; None before the first, and where it was cancelled"""
        self.steps: list[Step] = []
        """of the present order, as far as they were heard"""
        self.forks: list[Fork] = []
        """of the present order: branches behind those of its rows"""
        self.over = True
        """whether no further step of the present order will be heard"""

    def open(self) -> None:
        """Have the worker read the prompt, once."""
        if self._setup is not None:
            self.link.send(Kind.OPEN, self._setup)
            self._setup = None

    def draft(self, order: Order) -> None:
        """Draft on. The order is given its epoch here."""
        self.open()
        self.worker.epoch += 1
        self.order, self.steps, self.forks, self.over = order, [], [], False
        self.link.send(Kind.DRAFT, encode(tuple(order._replace(epoch=self.worker.epoch))))

    def wait(self, steps: int | None) -> None:
        """Wait until so many steps of the present order are there; None waits for all."""
        with self._listening():
            while not self.over and (steps is None or len(self.steps) < steps):
                deadline, before = Deadline(self.patience), len(self.steps)
                while not self.over and len(self.steps) == before:
                    self._hear(deadline)

    def q(self, branch: int, column: int, tokens: list[int]) -> Tensor:
        """float32 q of some tokens, or of all [V] where none are named, at a drafted column of a branch."""
        with self._listening():
            self.link.send(Kind.ASK, encode((branch, column, tokens)))
            deadline = Deadline(self.patience)
            while (message := self._hear(deadline))[0] is not Kind.ANSWER:
                pass
            return decode_probabilities(message[1], len(tokens) or self.vocab)

    def cancel(self) -> None:
        """Stop drafting, between two steps. The present order's steps stay, its forks are forgotten."""
        if not self.over:
            self.link.send(Kind.CANCEL, encode(self.worker.epoch))
        self.order, self.forks, self.over = None, [], True

    def close(self) -> None:
        """End the call. The worker is freed, or ended where it may be in trouble."""
        try:
            if not (self.sound and self.link.whole):
                raise ConnectionError("the wire is not clean")
            self.link.send(Kind.CANCEL, encode(self.worker.epoch))
            self.link.send(Kind.CLOSE)
        except OSError:
            self.worker.close()
        else:
            (self.worker.free or self.worker.close)()

    @property
    def traffic(self) -> tuple[int, int]:
        """Messages and bytes of this call, both ways."""
        return self.link.messages - self.before[0], self.link.bytes - self.before[1]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Whatever ends the block early, Ctrl-C too, leaves answers behind on the wire."""
        self.sound = False
        yield
        self.sound = True

    def _hear(self, deadline: Deadline) -> tuple[Kind, bytes]:
        """The next message, taken in. What was drafted for older orders is passed over."""
        message = None if deadline.over else self.link.receive()
        if message is None:
            raise TimeoutError(f"the draft worker gave no usable answer for {self.patience} seconds")
        kind, body = message
        if kind is Kind.ERROR:
            raise RuntimeError(f"the draft worker raised {body[:1000].decode(errors='replace')}")
        if kind in (Kind.STEP, Kind.DONE) and epoch_of(body) == self.worker.epoch and not self.over:
            if kind is Kind.STEP:
                self._take(Step.decode(body))
            else:
                self.over = True
        return message

    def _take(self, step: Step) -> None:
        """The next step of the present order."""
        assert self.order is not None
        index = len(self.steps)
        if step.forks and (index or not self.order.forking or any(fork.first not in (0, 1) for fork in step.forks)):
            raise garbage("forks that nobody asked for")
        self.forks += step.forks
        branches = len(self.order.branches) + sum(fork.first <= index for fork in self.forks)
        fine = len(step.tokens) == branches and all(0 <= token < self.vocab for token in step.tokens)
        if self.do_sample:
            fine = fine and step.token_probs is not None and all(0 < q <= 1.0001 for q in step.token_probs)
            fine = fine and step.likely is not None and step.likely.fits(branches, self.vocab)
        if not fine or index == self.order.width:
            raise garbage("token ids, probabilities or steps out of range")
        self.steps.append(step)
