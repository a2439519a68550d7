"""`Noise` of coupled sampling: Gumbel noise that is the same for the target and for every drafter.

argmax(scores + G) with independent Gumbel noise G is a draw from softmax(scores). Where G comes from the seed and the
position alone, sampling is greedy decoding of scores with noise: draft and target see the same noise and agree often
(at least (1 - TV) / (1 + TV) of the time: Daliri et al. 2024), and a token never depends on who drafted what.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .randomness import GOLDEN, Purpose, Randomness, hashed, mixed

LEAST_KEPT = 128
"""positions whose noise is kept, as the next round asks for the same ones; more where one round asks for more"""
BELOW_1 = np.uint64(12)
"""of 64 bits, those that a double has no room for"""


class Noise:
    """Of one call, or of rows that come and go."""

    def __init__(self, randomness: Randomness, pads: Sequence[int] = (), copies: int = 1) -> None:
        """
        Args:
            pads: [B] columns of left padding, which are no positions; none where rows come and go.
            copies: texts of each prompt (`num_return_sequences`): they differ.
        """
        self.randomness, self.pads, self.copies = randomness, list(pads), copies
        self._kept: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()
        self._most = LEAST_KEPT

    def __call__(self, rows: Sequence[int], lengths: Sequence[int], like: Tensor) -> Tensor:
        """Noise [N, V] for N places with scores `like` [N, V]: for row `rows[n]` of the call behind `lengths[n]`
        columns."""
        keys = [self._key(row, length) for row, length in zip(rows, lengths, strict=True)]
        distinct = list(dict.fromkeys(keys))
        self._most = max(LEAST_KEPT, 2 * len(distinct))
        parts = [self._of(key, like.shape[1]) for key in distinct]
        noise = torch.from_numpy(np.stack(parts)).to(like.device) if parts else like.new_empty(0, like.shape[1])
        if keys == distinct:
            return noise
        where = {key: i for i, key in enumerate(distinct)}
        return noise[torch.tensor([where[key] for key in keys], device=like.device)]

    def _key(self, row: int, length: int) -> tuple[int, int, int]:
        pad = self.pads[row] if self.pads else 0
        return int(self.randomness.seed_of(row)), row % self.copies, length - pad

    def _of(self, key: tuple[int, int, int], vocab: int) -> np.ndarray:
        if key not in self._kept:
            seed, copy, position = key
            base = hashed(np.uint64(seed), [copy], [position], Purpose.CHOOSE)
            bits = mixed(base + np.arange(1, vocab + 1, dtype=np.uint64) * GOLDEN)
            u = ((bits >> BELOW_1).astype(np.float64) + 0.5) * 2.0**-52
            self._kept[key] = (-np.log(-np.log(u))).astype(np.float32)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return self._kept[key]

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes the noise itself."""
        return vars(self) | {"_kept": OrderedDict()}
