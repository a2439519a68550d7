"""The line between target and worker: framed binary messages over a socket, token ids and one q per drafted token.

What the worker answers is never unpickled: a frame is a kind, a length and plain numbers, all checked.
"""

import io
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from torch import Tensor

from ...clock import Deadline


class Kind(IntEnum):
    """What a message says. The upper ones go to the worker, the lower ones come from it."""

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
    FORKS = 15


FRAME = struct.Struct("<BQ")
STEP = struct.Struct("<qqdd")
LARGEST_ANSWER = 1 << 26
"""bytes; an announced length above it is garbage"""


class Link:
    """One end of the line. Sending is safe from several threads, receiving belongs to one."""

    def __init__(self, end: socket.socket, patience: float | None = None, largest: int = 1 << 62) -> None:
        """
        Args:
            patience: seconds after which a message that the other side does not take is an error.
            largest: bytes of the longest message to expect.
        """
        self.socket, self.patience, self.largest = end, patience, largest
        self.messages = self.bytes = 0
        self.whole = True
        """False once a message was sent in part: nothing that follows could be read"""
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        with self._sending:
            self.whole = False
            self.socket.settimeout(self.patience)
            self.socket.sendall(FRAME.pack(kind, len(body)) + body)
            self.whole = True
        self.messages += 1
        self.bytes += FRAME.size + len(body)

    def receive(self, timeout: float | None = None) -> tuple[Kind, bytes] | None:
        """The next message; None where none is complete after `timeout` seconds.

        Raises:
            ConnectionError: the other side is gone, or what came is no message.
        """
        deadline = None if timeout is None else Deadline(timeout)
        while True:
            if (message := self._complete()) is not None:
                self.messages += 1
                self.bytes += FRAME.size + len(message[1])
                return message
            self.socket.settimeout(None if deadline is None else deadline.left)
            try:
                part = self.socket.recv(1 << 20)
            except (TimeoutError, BlockingIOError):
                return None
            if not part:
                raise ConnectionError("the draft worker is gone")
            self._buffer += part

    def _complete(self) -> tuple[Kind, bytes] | None:
        if len(self._buffer) < FRAME.size:
            return None
        kind, size = FRAME.unpack_from(self._buffer)
        if size > self.largest or kind not in Kind.__members__.values():
            raise ConnectionError(f"the draft worker answered garbage: kind {kind}, {size} bytes")
        end = FRAME.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[FRAME.size : end])
        del self._buffer[:end]
        return Kind(kind), body

    def close(self) -> None:
        self.socket.close()


@dataclass
class Order:
    """Draft behind these rows. A row goes on from a line of the last order: its first `keep` columns, then `tail`."""

    epoch: int
    """names the order; later ones have higher numbers, whichever session gives them"""
    width: int
    """draft steps"""
    corrections: int
    """likely ones of each token to remember"""
    forking: bool
    """whether to draft behind those of unverified tokens, too"""
    rows: list[int]
    """[B] each row's index in the call's batch"""
    lines: list[int]
    """[B] lines of the last order: its rows come first, then its forks"""
    keeps: list[int]
    budgets: list[int]
    """[B] tokens wanted; others of the same step are thrown away"""
    unverified: list[int]
    """[B] how many of the row's last tokens the target has not seen"""
    tails: list[list[int]]

    def encode(self) -> bytes:
        numbers = [self.epoch, self.width, self.corrections, self.forking, len(self.rows)]
        for values in (self.rows, self.lines, self.keeps, self.budgets, self.unverified):
            numbers += values
        for tail in self.tails:
            numbers += [len(tail), *tail]
        return np.array(numbers, np.int64).tobytes()

    @classmethod
    def decode(cls, body: bytes) -> "Order":
        epoch, width, corrections, forking, b, *rest = np.frombuffer(body, np.int64).tolist()
        rows, lines, keeps, budgets, unverified = (rest[j * b : (j + 1) * b] for j in range(5))
        tails, i = [], 5 * b
        for _ in range(b):
            tails.append(rest[i + 1 : i + 1 + rest[i]])
            i += 1 + rest[i]
        return cls(epoch, width, corrections, bool(forking), rows, lines, keeps, budgets, unverified, tails)


@dataclass
class Fork:
    """A row's text with a correction in it that the target may make. What is drafted behind it is a line of its own."""

    row: int
    column: int
    """of the correction"""
    token: int
    first: int
    """the draft step of the order that gives the first token behind it"""


@dataclass
class Step:
    """One draft step: a token per line."""

    epoch: int
    draft_calls: int
    """forwards since the session was opened"""
    began: float
    ended: float
    """by `clock.now`, which all processes of a machine share"""
    tokens: list[int]
    token_probs: list[float] | None
    """q of each token; None for a draft that does not sample"""

    def encode(self) -> bytes:
        body = STEP.pack(self.epoch, self.draft_calls, self.began, self.ended) + np.array(self.tokens, "<i8").tobytes()
        return body if self.token_probs is None else body + np.array(self.token_probs, "<f4").tobytes()

    @classmethod
    def decode(cls, body: bytes, lines: int) -> "Step":
        size = STEP.size + 8 * lines
        if len(body) not in (size, size + 4 * lines):
            raise ConnectionError(f"the draft worker answered garbage: a step of {len(body)} bytes for {lines} lines")
        probs = np.frombuffer(body, "<f4", offset=size).tolist() if len(body) > size else None
        tokens = np.frombuffer(body, "<i8", lines, STEP.size).tolist()
        epoch, calls, began, ended = STEP.unpack_from(body)
        return cls(epoch, calls, began, ended, tokens, probs)


def encode_forks(epoch: int, forks: list[Fork]) -> bytes:
    numbers = [epoch]
    for fork in forks:
        numbers += [fork.row, fork.column, fork.token, fork.first]
    return encode_numbers(*numbers)


def decode_forks(body: bytes) -> list[Fork]:
    numbers = decode_numbers(body)[1:]
    if len(numbers) % 4:
        raise ConnectionError(f"the draft worker answered garbage: forks of {len(numbers)} numbers")
    return [Fork(*numbers[i : i + 4]) for i in range(0, len(numbers), 4)]


def encode_numbers(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def decode_numbers(body: bytes) -> list[int]:
    return np.frombuffer(body, "<i8").tolist()


def encode_object(value: Any, on_host: bool = False) -> bytes:
    """For what the drafter itself tells its own worker (the model, the call's options), never the other way.

    Args:
        on_host: let tensors arrive on the CPU, for a worker that may not have the device on which they lie.
    """
    pickler = OnHost if on_host else pickle.Pickler
    pickler(file := io.BytesIO(), protocol=5).dump(value)
    return file.getvalue()


class OnHost(pickle.Pickler):
    """See `encode_object`."""

    def reducer_override(self, value: Any) -> Any:
        return value.cpu().__reduce_ex__(5) if isinstance(value, Tensor) else NotImplemented


def decode_object(body: bytes) -> Any:
    return pickle.loads(body)
