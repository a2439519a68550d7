"""One stream of uniform numbers per row, position and purpose, so that no two decisions ever share a draw."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ..transfer import to_device

GOLDEN, MIX_1, MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SHIFT_27, SHIFT_30, SHIFT_31, SHIFT_32 = map(np.uint64, (27, 30, 31, 32))


class Purpose(IntEnum):
    """What a number decides. Tests of siblings in a tree use `ACCEPT + i`."""

    DRAFT = 0
    CHOOSE = 1
    BLOCK = 2
    """a test of a draft as a whole, whose place may be tested again in the next round"""
    ACCEPT = 3


AGAIN = (Purpose.DRAFT, Purpose.BLOCK)
"""purposes that may come up several times for one position: each attempt has a number of its own"""


class Randomness:
    """A counter-based generator (splitmix64): the number is a hash of (seed, row, position, purpose, attempt).

    A position that is drafted again in a later round needs a fresh number, since the drafter's choices may depend on
    its earlier draws. `attempt` tells the two apart.
    """

    def __init__(self, seed: int) -> None:
        self.seed = np.uint64(seed % 2**64)
        self.round = 0
        """the attempt of draws for drafts, and of block tests; `advance` counts it"""

    def advance(self, rows: Sequence[int]) -> None:
        """A round of these rows begins."""
        self.round += 1

    def uniform(
        self, rows: Sequence[int], positions: Sequence[int], purpose: int, attempt: int | np.ndarray = 0
    ) -> np.ndarray:
        """float64 numbers in [0, 1), one per (row, position) pair, or one per attempt at a single pair."""
        return _uniform(self.seed, rows, positions, purpose, attempt)

    def tensor(
        self, rows: Sequence[int], positions: Sequence[int], purpose: int, device: torch.device, attempt: int = 0
    ) -> Tensor:
        """The same as a float64 tensor on a device."""
        return to_device(self.uniform(rows, positions, purpose, attempt), device, torch.float64)

    def seed_of(self, row: int) -> np.uint64:
        """The seed of a row's numbers."""
        return self.seed

    def admit(self, row: int, own: "Randomness") -> None:
        """A row has joined, with numbers of its own; only where rows come and go."""

    def forget(self, row: int) -> None:
        """Such a row has left."""

    @classmethod
    def from_torch(cls) -> "Randomness":
        """Seeded by one draw from torch's global generator, so that `torch.manual_seed` fixes a call."""
        return cls(int(torch.randint(2**62, (), device="cpu")))


class RowRandomness(Randomness):
    """For rows that come and go: each row has the numbers of a call of one row, with the row's own seed."""

    def __init__(self) -> None:
        super().__init__(0)
        self.of: dict[int, Randomness] = {}
        """by row"""

    def admit(self, row: int, own: Randomness) -> None:
        self.of[row] = own

    def forget(self, row: int) -> None:
        self.of.pop(row, None)

    def advance(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.of[row].round += 1

    def uniform(
        self, rows: Sequence[int], positions: Sequence[int], purpose: int, attempt: int | np.ndarray = 0
    ) -> np.ndarray:
        """As in `Randomness`, with the attempt of each row added."""
        mine = [self.of[row] for row in rows]
        seeds = np.array([own.seed for own in mine], np.uint64)
        rounds = np.array([own.round for own in mine], np.int64) + attempt if purpose in AGAIN else attempt
        return _uniform(seeds, [0] * len(mine), positions, purpose, rounds)

    def seed_of(self, row: int) -> np.uint64:
        return self.of[row].seed


def _uniform(
    seed: np.uint64 | np.ndarray, rows: Sequence[int], positions: Sequence[int], purpose: int, attempt: int | np.ndarray
) -> np.ndarray:
    return (hashed(seed, rows, positions, purpose, attempt) >> SHIFT_32) * 2.0**-32


def hashed(
    seed: np.uint64 | np.ndarray,
    rows: Sequence[int],
    positions: Sequence[int],
    purpose: int,
    attempt: int | np.ndarray = 0,
) -> np.ndarray:
    """64 bits for each of N decisions."""
    shift = np.asarray((purpose % 2**12 << 36) + (attempt % 2**16 << 48), np.uint64)
    counter = mixed(np.asarray(positions, np.uint64) + shift)
    counter ^= np.asarray(rows, np.uint64) * GOLDEN
    return mixed(mixed(counter + seed) ^ seed)


def mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser; products wrap around on purpose (numpy warns of that for scalars only)."""
    x = (x ^ (x >> SHIFT_30)) * MIX_1
    x = (x ^ (x >> SHIFT_27)) * MIX_2
    return x ^ (x >> SHIFT_31)
