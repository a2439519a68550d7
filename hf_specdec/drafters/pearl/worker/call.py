"""`WorkerCall`: what one call tells its worker, and what it is told. Every answer is checked before it is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ....clock import Deadline
from ..token import DraftToken
from .wire import Fork, Order, Setup, garbage, packed
from .workers import Worker


class WorkerCall:
    """The session's side of a call: draft on, stop.

    What is waited for may raise:
        ConnectionError: the worker is gone or answers garbage.
        TimeoutError: it is silent.
        RuntimeError: the draft model raised.
    """

    def __init__(
        self,
        worker: Worker,
        setup: Setup,
        patience: float,
        record: Callable[[Order, int, float, float, bool], None],
        give_back: Callable[[Worker, bool], None],
    ) -> None:
        """
        Args:
            patience: seconds to wait for an answer, and for a message to be taken.
            record: told of each draft step its order, the forwards of this call so far, when it began and ended by
                `clock.now`, and whether it was one of forks, too.
            give_back: what becomes of the worker at the end, and whether it can be used again.
        """
        self.worker, self.patience, self.record, self.give_back = worker, patience, record, give_back
        self.vocab, self.do_sample = setup.picker.vocab, setup.picker.do_sample
        worker.link.doubt(patience)
        self._setup: bytes | None = packed("open", setup)
        """as it is now; None once the worker was told"""
        self.order: Order | None = None
        """the present one; None before the first, and where it was cancelled"""
        self.drafted: list[list[DraftToken]] = []
        """of the present order: what was heard of each text, of its rows and then of its forks"""
        self.forks: list[Fork] = []
        """of the present order"""
        self.over = True
        """whether no further step of the present order will be heard"""
        self.clean = True
        """False while something is said, and when that was not said to its end"""

    def open(self) -> None:
        """Have the worker read the prompt, once."""
        if self._setup is not None:
            with self._talking():
                self.worker.link.send_packed(self._setup)
            self._setup = None

    def draft(self, order: Order) -> None:
        """Draft on. What was ordered before has become useless."""
        self.open()
        self.worker.orders += 1
        self.order, self.drafted, self.forks, self.over = order, [[] for _ in order.rows], [], False
        with self._talking():
            self.worker.link.send("draft", self.worker.orders, order)

    def wait(self, steps: int | None) -> None:
        """Wait until so many steps of the present order are there; None waits for all."""
        with self._talking():
            while not self.over and (steps is None or self.heard < steps):
                deadline, before = Deadline(self.patience), self.heard
                while not self.over and self.heard == before:
                    self._hear(deadline)

    @property
    def heard(self) -> int:
        """Steps of the present order."""
        return len(self.drafted[0])

    def cancel(self) -> None:
        """What is drafted for the present order is of no use any more."""
        self.order, self.forks, self.over = None, [], True

    def close(self) -> None:
        """End the call. The worker is freed, or ended where it may be in trouble."""
        if self.clean:
            with suppress(OSError), self._talking():
                self.worker.link.send("close")
        self.give_back(self.worker, self.clean)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Whatever ends the block early, Ctrl-C too, leaves the wire unclean."""
        self.clean = False
        yield
        self.clean = True

    def _hear(self, deadline: Deadline) -> None:
        """Take in the next message. What comes of older orders is passed over."""
        message = None if deadline.over else self.worker.link.receive()
        match message:
            case None:
                raise TimeoutError(f"the draft worker gave no usable answer for {self.patience} seconds")
            case ("error", str(error)):
                raise RuntimeError(f"the draft worker raised {error[:1000]}")
            case ("step" | "done", int(number), *_) if number != self.worker.orders or self.over:
                pass
            case ("step", _, *said):
                self._take(*said)
            case ("done", _):
                self.over = True
            case _:
                raise garbage("no message")

    def _take(self, draft_calls: int, began: float, ended: float, tokens: list[Any], forks: list[Any]) -> None:
        """The next step of the present order: a token of each text."""
        assert self.order is not None
        index = self.heard
        forks = [Fork(*fork) for fork in forks]
        if forks and (index or not self.order.forking or any(fork.first not in (0, 1) for fork in forks)):
            raise garbage("forks that nobody asked for")
        self.forks += forks
        texts = len(self.order.rows) + sum(fork.first <= index for fork in self.forks)
        self.drafted += [[] for _ in range(texts - len(self.drafted))]
        drawn = [DraftToken(*token) for token in tokens]
        fine = all(token.can_be(self.vocab, self.do_sample) for token in drawn)
        if len(drawn) != texts or not fine or index == self.order.width:
            raise garbage("token ids, probabilities or steps out of range")
        for text, token in zip(self.drafted, drawn, strict=True):
            text.append(token)
        self.record(self.order, int(draft_calls), float(began), float(ended), texts > len(self.order.rows))
