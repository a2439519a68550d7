"""The wire between target and worker: messages over a connection of the standard library.

A message is a tuple, which begins with its name. To the worker go `model`, `open`, `draft` and `close`; from it come
`ready`, `step`, `done` and `error`, of plain numbers in lists and tuples.
"""

import io
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....verify.picking import DraftPicker

TIMEVAL = struct.Struct("ll")
"""seconds and microseconds, as POSIX tells a socket"""
LARGEST_ANSWER = 1 << 26
"""bytes; an announced length above it is garbage"""


class Link:
    """One end of the wire."""

    def __init__(self, end: socket.socket) -> None:
        self.connection = Connection(end.detach())
        self.largest: int | None = None
        """bytes of a message from a side that is doubted; None where it is not"""

    def doubt(self, patience: float) -> None:
        """The other side may take so many seconds to send what is waited for, or to take what is sent. What it sends is
        plain, and no larger than `LARGEST_ANSWER`."""
        self.largest = LARGEST_ANSWER
        seconds, rest = divmod(patience, 1)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(int(seconds), int(rest * 1e6)))

    def send(self, *message: Any) -> None:
        self.send_packed(packed(*message))

    def send_packed(self, message: bytes) -> None:
        self.connection.send_bytes(message)

    def receive(self) -> Any:
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
        return pickle.loads(message) if self.largest is None else plain(message)

    def close(self) -> None:
        self.connection.close()


def packed(*message: Any) -> bytes:
    """Not by the connection itself: for it torch would leave tensors in shared memory."""
    return pickle.dumps(message, protocol=5)


class Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and tuples, and refuses all that has a name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def plain(message: bytes) -> Any:
    """
    Raises:
        ConnectionError: it says nothing, or something that is not plain.
    """
    try:
        return Plain(io.BytesIO(message)).load()
    except Exception as error:  # of many kinds
        raise garbage(f"a message of {len(message)} bytes") from error


def garbage(what: str) -> ConnectionError:
    """The error for an answer that cannot be meant."""
    return ConnectionError(f"the draft worker answered garbage: {what}")


# ---------------------------------------------------------------------- what is said


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
    """on the CPU. It draws the token of each position by one number, however often the position is drafted. Only the
    last draft of a position is ever tested, so the numbers need not be independent. A seeded text with a fixed window
    therefore depends neither on the window nor on timing."""

    def cast(self, device_type: str) -> torch.autocast:
        """The caller's autocast, which does not reach other threads by itself."""
        return torch.autocast(device_type, dtype=self.autocast.get(device_type), enabled=device_type in self.autocast)


class RowOrder(NamedTuple):
    """What to draft behind a row."""

    row: int
    """of the call's batch"""
    text: int
    """number of the text that it goes on from, of those that the last order left behind: its rows, then its forks"""
    start: int
    """columns of the row that are as they were at the last order"""
    tokens: list[int]
    """those behind, unverified ones included"""
    unverified: int
    """how many of the last ones the target has not seen"""
    wanted: int
    """tokens that are wanted; those of later steps are thrown away"""


class Order(NamedTuple):
    """Draft behind these rows, in as many steps as one of them wants tokens."""

    rows: list[RowOrder]
    corrections: int
    """how many to draft for, for each unverified token"""
    beside: bool
    """whether the target verifies meanwhile; only then are corrections drafted for"""

    @property
    def width(self) -> int:
        return max(row.wanted for row in self.rows)

    @property
    def forking(self) -> bool:
        return self.beside and self.corrections > 0


class Fork(NamedTuple):
    """A text with a correction that the target may make: the row's up to there, and the correction behind it."""

    row: int
    column: int
    """of the correction"""
    token: int
    first: int
    """the draft step of the order that gives the first token behind it: 0 or 1"""
