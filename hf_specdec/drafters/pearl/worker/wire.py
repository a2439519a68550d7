"""The wire between target and worker: a connection of the standard library, whose messages begin with their kind.

The worker is told the call's setup, orders and questions. It answers token ids and one q per drafted token. No answer
is unpickled: it is a kind and plain numbers, and all of them are checked.
"""

import io
import os
import pickle
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....verify.picking import DraftPicker
from ..likely import Likely
from ..overlap import Drafted


class Kind(IntEnum):
    """What a message says. The first ones go to the worker, the last ones come from it."""

    MODEL = 1
    OPEN = 2
    DRAFT = 3
    CANCEL = 4
    ASK = 5
    CLOSE = 6

    READY = 10
    STEP = 11
    DONE = 12
    ANSWER = 13
    ERROR = 14


TIMEVAL = struct.Struct("ll")
"""seconds and microseconds, as POSIX tells a socket"""
LARGEST_ANSWER = 1 << 26
"""bytes; an announced length above it is garbage"""


class Link:
    """One end of the wire. Several threads may send; only one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self.connection = Connection(end.detach())
        self.largest: int | None = None
        """bytes of a message"""
        self.messages = self.bytes = 0
        self.whole = True
        """False once a message was sent in part: nothing that follows could be read"""
        self._sending = threading.Lock()

    def limit(self, patience: float) -> None:
        """Doubt the other side: it may take so many seconds to send what is waited for, or to take what is sent, and
        what it sends is no larger than `LARGEST_ANSWER`."""
        self.largest = LARGEST_ANSWER
        seconds, rest = divmod(patience, 1)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(int(seconds), int(rest * 1e6)))

    def send(self, kind: Kind, body: bytes = b"") -> None:
        message = bytes([kind]) + body
        with self._sending:
            self.whole = False
            self.connection.send_bytes(message)
            self.whole = True
        self._count(message)

    def receive(self) -> tuple[Kind, bytes] | None:
        """The next message; None where the other side's time is over.

        Raises:
            OSError: the other side is gone, or what came is no message.
        """
        try:
            message = self.connection.recv_bytes(self.largest)
        except BlockingIOError:
            return None
        except EOFError as error:
            raise ConnectionError("the draft worker is gone") from error
        if not message or message[0] not in Kind.__members__.values():
            raise garbage(f"a message of {len(message)} bytes")
        self._count(message)
        return Kind(message[0]), message[1:]

    def _count(self, message: bytes) -> None:
        self.messages += 1
        self.bytes += len(message)

    def close(self) -> None:
        self.connection.close()


def garbage(what: str) -> ConnectionError:
    """The error for an answer that cannot be meant."""
    return ConnectionError(f"the draft worker answered garbage: {what}")


# ---------------------------------------------------------------------- to the worker


@dataclass
class Setup:
    """What a worker has to know of a call."""

    prompt_ids: Tensor
    """[B, P] left-padded, on the CPU"""
    prompt_mask: Tensor
    """[B, P] 1 where `prompt_ids` is not padding"""
    eos_token_ids: frozenset[int]
    lockstep: bool
    """rows keep equal lengths"""
    autocast: dict[str, torch.dtype]
    """what the caller's autocast casts to, by the types of devices for which it is on"""
    picker: DraftPicker
    """It draws the token of each position by one number, however often the position is drafted. Only the last draft of
    a position is ever tested, so the numbers need not be independent. A seeded text with a fixed window therefore
    depends neither on the window nor on timing."""

    def cast(self, device_type: str) -> torch.autocast:
        """The caller's autocast, which does not reach other threads by itself."""
        return torch.autocast(device_type, dtype=self.autocast.get(device_type), enabled=device_type in self.autocast)


class Order(NamedTuple):
    """Draft behind these rows. Each goes on from one of the branches that the last order left behind."""

    width: int
    """draft steps"""
    corrections: int
    """how many likely ones to remember for each drafted token"""
    forking: bool
    """whether to draft behind corrections of the unverified tokens, too"""
    branches: list[int]
    """[B] numbers of branches of the last order: its rows come first, then its forks"""
    starts: list[int]
    """[B] columns of the row's text that are as they were at the last order"""
    tokens: list[list[int]]
    """[B] the row's text behind `starts`, unverified tokens included"""
    unverified: list[int]
    """[B] how many of the row's last tokens the target has not seen"""
    wanted: list[int]
    """[B] tokens that are wanted; those of later steps are thrown away"""
    epoch: int = -1
    """the order's name: later ones have higher numbers, in whichever call they are given"""


def encode(value: Any, on_host: bool = False) -> bytes:
    """Pickles what a drafter tells its own worker. Nothing goes the other way like this.

    Args:
        on_host: let tensors arrive on the CPU, for a worker that may not have the device on which they are.
    """
    pickler = OnHost if on_host else pickle.Pickler
    pickler(file := io.BytesIO(), protocol=5).dump(value)
    return file.getvalue()


class OnHost(pickle.Pickler):
    """See `encode`."""

    def reducer_override(self, value: Any) -> Any:
        return value.cpu().__reduce_ex__(5) if isinstance(value, Tensor) else NotImplemented


def decode(body: bytes) -> Any:
    return pickle.loads(body)


# ---------------------------------------------------------------------- from the worker


class Fork(NamedTuple):
    """A branch for a correction that the target may make: the row's text up to there, and the correction behind it."""

    row: int
    column: int
    """of the correction"""
    token: int
    first: int
    """the draft step of the order that gives the first token behind it: 0 or 1"""


@dataclass
class Step:
    """What one draft step gives."""

    epoch: int
    draft_calls: int
    """forwards since the call was opened"""
    began: float
    ended: float
    """by `clock.now`, which all processes of a machine share"""
    tokens: list[int]
    """one for each branch"""
    token_probs: list[float] | None = None
    """q of each token; None for a draft that does not sample"""
    forks: list[Fork] = field(default_factory=list)
    """in an order's first step, all of the order: branches behind those of its rows"""
    likely: Likely | None = None
    """[L, K] where each branch's token was drawn from; None for a draft that does not sample"""

    HEAD: ClassVar = struct.Struct("<qqddqqq")

    def drafted(self, branch: int) -> Drafted:
        """What a branch was given."""
        if self.token_probs is None or self.likely is None:
            return Drafted(self.tokens[branch])
        return Drafted(self.tokens[branch], self.token_probs[branch], self.likely.of(branch))

    def encode(self) -> bytes:
        sizes = len(self.tokens), len(self.forks), 0 if self.likely is None else self.likely.q.shape[1]
        head = self.HEAD.pack(self.epoch, self.draft_calls, self.began, self.ended, *sizes)
        numbers = encode_numbers(*self.tokens, *(number for fork in self.forks for number in fork))
        body = head + numbers + np.array(self.token_probs or [], "<f4").tobytes()
        if self.likely is not None:
            body += self.likely.tokens.numpy().astype("<i4").tobytes() + self.likely.q.numpy().astype("<f4").tobytes()
        return body

    @classmethod
    def decode(cls, body: bytes) -> "Step":
        """
        Raises:
            ConnectionError: it is no step.
        """
        if len(body) < cls.HEAD.size:
            raise garbage(f"a step of {len(body)} bytes")
        epoch, calls, began, ended, count, forks, width = cls.HEAD.unpack_from(body)
        end = cls.HEAD.size + 8 * (count + len(Fork._fields) * forks)
        if min(count, forks, width) < 0 or len(body) not in (end, end + 4 * count * (1 + 2 * width)):
            raise garbage(f"a step of {len(body)} bytes for {count} tokens and {forks} forks")
        numbers = decode_numbers(body[cls.HEAD.size : end])
        found = [Fork(*numbers[i : i + 4]) for i in range(count, len(numbers), 4)]
        step = cls(epoch, calls, began, ended, numbers[:count], forks=found)
        if len(body) > end:
            middle = end + 4 * count * (1 + width)
            told = np.frombuffer(body[end:middle], "<f4"), np.frombuffer(body[end:middle], "<i4")
            step.token_probs = told[0][:count].tolist()
            tokens = torch.from_numpy(told[1][count:].astype("<i8")).view(count, width)
            q = torch.from_numpy(np.frombuffer(body, "<f4", offset=middle).copy()).view(count, width)
            step.likely = Likely(tokens, q)
        return step


def epoch_of(body: bytes) -> int:
    """The first number of an answer; -1 where there is none."""
    return decode_numbers(body[:8])[0] if len(body) >= 8 else -1


def encode_numbers(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def decode_numbers(body: bytes) -> list[int]:
    return np.frombuffer(body, "<i8").tolist()


def decode_probabilities(body: bytes, count: int) -> Tensor:
    """[count] float32.

    Raises:
        ConnectionError: they are no probabilities, or not so many.
    """
    q = np.frombuffer(body, "<f4") if len(body) == 4 * count else np.empty(0)
    if len(q) != count or not ((q >= 0) & (q <= 1.0001)).all():
        raise garbage(f"{len(body)} bytes, where {count} probabilities were asked for")
    return torch.from_numpy(q.copy())
