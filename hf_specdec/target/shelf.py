"""`Shelf`: static buffers of a model, with what was recorded over them, which wait for its next call. Those of all
models take a share of a device's memory and no more."""

import itertools
import threading
import weakref
from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from .buffers import Buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_KEPT = 4
"""sets of buffers per model that are kept for later calls"""
SHARE = 0.25
"""of the memory that a device has for them, which all that are kept take at most"""


class Shelf:
    """Buffers of a model, for one call after the other."""

    def __init__(self) -> None:
        self.state: Hashable = 0
        self.kept: list[Buffers] = []
        """the last ones used first; what is in use is kept afterwards"""
        self.lock = threading.Lock()

    def borrow(self, like: Cache, rows: int, slots: int, device: torch.device, state: Hashable) -> Buffers:
        """Cleared buffers of this shape that nobody uses; they are made where there are none.

        Args:
            state: the model's `fingerprint`; what was recorded of another state is of no use.

        Raises:
            torch.OutOfMemoryError: there is no memory for new ones.
        """
        with self.lock:
            if state != self.state:
                self.state, self.kept = state, []
            found = next((b for b in self.kept if b.free is not None and (b.rows, b.slots) == (rows, slots)), None)
            if found is None:
                found = _made(like, rows, slots, device)
            else:
                found.take()
            found.turn = next(_turns)
            self.kept = [found, *(kept for kept in self.kept if kept is not found)][:MOST_KEPT]
            return found

    def let_go_of(self, buffers: Buffers) -> None:
        with self.lock:
            self.kept = [kept for kept in self.kept if kept is not buffers]

    def let_go(self) -> None:
        """Of those that nobody uses."""
        self.kept = [kept for kept in self.kept if kept.free is None]


_shelves: "weakref.WeakKeyDictionary[PreTrainedModel, Shelf]" = weakref.WeakKeyDictionary()
_turns = itertools.count(1)
_lock = threading.Lock()


def shelf_of(model: "PreTrainedModel") -> Shelf:
    """Where a model's buffers wait."""
    with _lock:
        return _shelves.setdefault(model, Shelf())


def release(model: "PreTrainedModel") -> None:
    """Let go of what is kept on a model's device for its next calls: static buffers and recorded forwards. The next
    call makes them anew; one that goes on keeps its own until it ends.

    Args:
        model: a target, a draft model or a head's.
    """
    with _lock:
        for inside in model.modules():  # of one that adapters or `torch.compile` are put around, too
            _shelves.pop(inside, None)
    torch.cuda.empty_cache()


def keep_a_share() -> int:
    """Once a call is over: of all buffers on a device the last ones used stay, as far as their share goes.

    Returns:
        Bytes of all that stay, of all models.
    """
    there = [(kept, shelf) for shelf in _all() for kept in shelf.kept]
    there.sort(key=lambda pair: pair[0].turn, reverse=True)
    sizes = [kept.num_bytes for kept, _ in there]
    left: dict[torch.device, float] = {}
    for device in {kept.device for kept, _ in there}:
        mine = sum(size for (kept, _), size in zip(there, sizes, strict=True) if kept.device == device)
        left[device] = SHARE * (free_bytes(device) + mine)
    for (kept, shelf), size in zip(there, sizes, strict=True):
        if size <= left[kept.device]:
            left[kept.device] -= size
        else:
            shelf.let_go_of(kept)
    return held_bytes()


def held_bytes() -> int:
    """Of all buffers and recordings that are kept, of all models."""
    return sum(kept.num_bytes for shelf in _all() for kept in shelf.kept)


def free_bytes(device: torch.device) -> float:
    """Of a device's memory, with what torch keeps of it for nobody; infinite where recordings are not made."""
    if device.type != "cuda":
        return inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _all() -> list[Shelf]:
    with _lock:
        return list(_shelves.values())


def _made(like: Cache, rows: int, slots: int, device: torch.device) -> Buffers:
    """New ones. Where memory is short those that nobody uses go first.

    Raises:
        torch.OutOfMemoryError: that is not enough.
    """
    try:
        return Buffers(like, rows, slots, device)
    except torch.OutOfMemoryError:
        for shelf in _all():
            shelf.let_go()
        torch.cuda.empty_cache()
        return Buffers(like, rows, slots, device)
