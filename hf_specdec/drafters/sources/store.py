"""`SuffixStore`: past token sequences in a fixed amount of memory, searched by the end of a new one.

A ring of token ids, newest over oldest. For each n-gram length of `GRAMS` a hash table holds the latest place where an
n-gram ended, and every place a link to the one before it, as in a compressor's window. A link that leads to a place
already written over is a dead end, so eviction costs nothing.
"""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import SpeculationError

GRAMS = (8, 4, 2)
"""Lengths of the indexed n-grams; a match is at least as long as the last."""
END = -1
"""Parts sequences in the ring: no match and no draft crosses it."""
_BYTES_PER_TOKEN = 4 + len(GRAMS) * (4 + 4)


@dataclass
class Continuations:
    """What followed the longest match, newest first."""

    length: int
    """Tokens that agree, at most `max_match`; 0 where nothing matched."""
    tokens: list[list[int]]
    """Each a copy of the text after one occurrence, cut at its sequence's end."""


class SuffixStore:
    """Past sequences with how often each went on how; safe to share between threads.

    Args:
        memory_mb: bound of the memory of all tables together, in 2^20 bytes; the oldest tokens make room.
    """

    is_taught = True
    """a copy has read nothing yet"""

    def __init__(self, memory_mb: int = 64) -> None:
        if memory_mb < 1:
            raise SpeculationError(f"memory_mb must be at least 1, got {memory_mb}")
        self.memory_mb = memory_mb
        self.capacity = (memory_mb << 20) * 15 // 16 // _BYTES_PER_TOKEN  # the rest is for what `add` needs meanwhile
        """Tokens held at most, the ends of sequences included."""
        self._slots = 1 << ((self.capacity // 2).bit_length() - 1)
        # Zeroed pages take no memory before they are used. Places count from 1, so that 0 means none.
        self._ring = np.zeros(self.capacity, dtype=np.int32)
        self._latest = {n: np.zeros(self._slots, dtype=np.int64) for n in GRAMS}
        self._back = {n: np.zeros(self.capacity, dtype=np.int32) for n in GRAMS}  # distance to the place before
        self._end = 1  # the place of the next token
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same bound, and holds nothing yet; `save` keeps what is held."""
        return SuffixStore, (self.memory_mb,)

    def __len__(self) -> int:
        """Tokens held, the ends of sequences included."""
        return min(self._end - 1, self.capacity)

    @property
    def num_bytes(self) -> int:
        """Memory of all tables, the unused part included."""
        return self._ring.nbytes + sum(self._latest[n].nbytes + self._back[n].nbytes for n in GRAMS)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add one sequence of token ids (0 or more)."""
        sequence = np.asarray(tokens)
        if len(sequence) and sequence.min() < 0:
            raise SpeculationError("tokens holds a negative id; a store takes token ids of 0 or more")
        with self._lock:
            self._append(sequence)
            self._append(np.array([END]))

    def _append(self, tokens: np.ndarray) -> None:
        block = self.capacity // 256
        for first in range(0, len(tokens), block):
            piece = tokens[first : first + block]
            places = np.arange(self._end, self._end + len(piece))
            self._ring[places % self.capacity] = piece
            self._end += len(piece)
            for n in GRAMS:
                self._link(n, places[piece != END])

    def _link(self, n: int, places: np.ndarray) -> None:
        """Enter the n-grams that end just before `places`."""
        grams = self._tokens_at(places[:, None] - np.arange(n, 0, -1))
        whole = (grams != END).all(axis=1)
        places, slots = places[whole], self._hash(grams[whole])
        order = np.argsort(slots, kind="stable")
        places, slots = places[order], slots[order]
        first = np.diff(slots, prepend=-1) != 0
        before = np.where(first, self._latest[n][slots], np.roll(places, 1))
        distance = np.where(before > 0, places - before, 0)
        self._back[n][places % self.capacity] = np.where(distance < self.capacity, distance, 0)
        last = np.diff(slots, append=-1) != 0
        self._latest[n][slots[last]] = places[last]

    def _tokens_at(self, places: np.ndarray) -> np.ndarray:
        """The tokens at any places; END where a place is not held (yet, or any more)."""
        held = (places >= max(1, self._end - self.capacity)) & (places < self._end)
        return np.where(held, self._ring[places % self.capacity], END)

    def _hash(self, grams: np.ndarray) -> np.ndarray:
        """Slots of n-grams [..., n]."""
        mixed = np.zeros(grams.shape[:-1], dtype=np.uint64)
        for i in range(grams.shape[-1]):
            mixed = (mixed ^ grams[..., i].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return (mixed & np.uint64(self._slots - 1)).astype(np.int64)

    def continuations(
        self, suffix: Sequence[int], length: int, max_match: int = 32, samples: int = 64
    ) -> Continuations:
        """What followed the longest earlier match of `suffix`, in its `samples` latest occurrences.

        Args:
            suffix: the last tokens of a sequence; more than `max_match` are ignored.
            length: tokens wanted of each continuation.
        """
        tail = np.asarray(suffix[-max_match:], dtype=np.int64)
        with self._lock:
            for n in GRAMS:
                if len(tail) < n or not (places := self._occurrences(n, tail[-n:], samples)):
                    continue
                found = np.array(places)
                earlier = self._tokens_at(found[:, None] - np.arange(1, len(tail) + 1))
                agree = np.logical_and.accumulate(earlier == tail[::-1], axis=1).sum(axis=1)
                longest = int(agree.max())
                if longest >= n:
                    texts = self._tokens_at(found[agree == longest][:, None] + np.arange(length))
                    return Continuations(longest, [_until_end(text) for text in texts.tolist()])
        return Continuations(0, [])

    def _occurrences(self, n: int, gram: np.ndarray, samples: int) -> list[int]:
        """Places after n-grams with the hash of `gram`, latest first."""
        place = int(self._latest[n][self._hash(gram[None])[0]])
        oldest = max(1, self._end - self.capacity) + n
        places: list[int] = []
        while place >= oldest and len(places) < samples:
            places.append(place)
            distance = int(self._back[n][place % self.capacity])
            if not distance:
                break
            place -= distance
        return places

    def save(self, file: str | Path) -> None:
        """Write the held tokens to a safetensors file."""
        with self._lock:
            held = np.arange(max(1, self._end - self.capacity), self._end)
            tokens = self._ring[held % self.capacity]
        metadata = {"format": "hf_specdec suffix store", "crc32": str(zlib.crc32(tokens.tobytes()))}
        save_file({"tokens": torch.from_numpy(tokens)}, str(file), metadata)

    @classmethod
    def load(cls, file: str | Path, memory_mb: int = 64) -> "SuffixStore":
        """Read what `save` wrote; what does not fit into `memory_mb` is dropped, the oldest first.

        Raises:
            SpeculationError: no such file, or it is truncated, damaged or something else.
        """
        try:
            with safe_open(str(file), framework="pt") as stored:
                metadata = stored.metadata() or {}
                tokens = stored.get_tensor("tokens").numpy()
        except (SafetensorError, OSError) as error:
            raise SpeculationError(f"{file} is not a complete suffix store ({error}); save the store again") from error
        if tokens.dtype != np.int32 or tokens.ndim != 1 or metadata.get("crc32") != str(zlib.crc32(tokens.tobytes())):
            raise SpeculationError(f"{file} is damaged: its tokens do not match their checksum; save the store again")
        store = cls(memory_mb)
        store._append(tokens[-store.capacity :])
        return store


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens
