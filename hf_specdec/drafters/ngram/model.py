"""`NGramModel`: interpolated Kneser-Ney over token ids, as sorted arrays.

    q(w | h) = q_order(w | h) + λ(h) · q(w | h without its oldest token),   down to   q(w) = q_1(w) + λ / V

`q_order` is the discounted count of w after h over the count of h, and λ(h) is the mass that discounting and pruning
took away, so every row sums to one and no token has probability zero. An n-gram is the key `prefix · V + token`, its
place in the sorted keys is its id, and a context's successors lie side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...errors import SpeculationError

MOST_LIKELY = 16
"""Tokens kept for contexts that are not in the tables."""


@dataclass
class Level:
    """The n-grams of one order above 1; S of them."""

    keys: np.ndarray
    """[S] int64, sorted: id of the first n - 1 tokens · V + the last token."""
    probs: np.ndarray
    """[S] float32: discounted probability of the last token after the others."""
    backoff: np.ndarray
    """[S] float32: λ of the n-gram as a context; 1 where nothing is known to follow it."""


@dataclass
class NGramModel:
    """Probabilities of the next token after the last `order` - 1 tokens."""

    unigram: np.ndarray
    """[V] float32: q(w), sums to one."""
    backoff: np.ndarray
    """[V] float32: λ of each token as a context."""
    levels: list[Level]
    """Orders 2, 3, ..."""

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)

    @property
    def order(self) -> int:
        return 1 + len(self.levels)

    @property
    def sizes(self) -> list[int]:
        """N-grams kept per order, from 2 up."""
        return [len(level.keys) for level in self.levels]

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        arrays = [self.unigram, self.backoff, *(a for lv in self.levels for a in (lv.keys, lv.probs, lv.backoff))]
        return sum(array.nbytes for array in arrays)

    def next_probs(self, context: Sequence[int]) -> np.ndarray:
        """q of every next token.

        Args:
            context: token ids, the latest last; only the last `order` - 1 count.

        Returns:
            [V] float32 that sums to one.
        """
        q = self.unigram.copy()
        for backoff, level, node in self._known(context):  # each mixed over the shorter one
            first, end = self._behind(level, node)
            q *= backoff
            q[level.keys[first:end] - node * self.vocab_size] += level.probs[first:end]
        return q

    def likeliest(self, context: Sequence[int], count: int) -> list[tuple[int, float]]:
        """At most `count` likely next tokens, the likeliest first, each with its q or a little less: only the likeliest
        of each known context are looked at, which takes microseconds. Arguments as in `next_probs`."""
        found: dict[int, float] = {}
        left = 1.0  # of q, for shorter contexts
        for backoff, level, node in reversed(self._known(context)):
            first, end = self._behind(level, node)
            for i in _largest(level.probs[first:end], count):
                token = int(level.keys[first + i]) - node * self.vocab_size
                found[token] = found.get(token, 0.0) + left * float(level.probs[first + i])
            left *= backoff
        for token in self._likeliest[:count]:
            found[token] = found.get(token, 0.0) + left * float(self.unigram[token])
        return sorted(found.items(), key=lambda known: -known[1])[:count]

    @cached_property
    def _likeliest(self) -> list[int]:
        """The likeliest tokens without a context."""
        return _largest(self.unigram, MOST_LIKELY)

    def _known(self, context: Sequence[int]) -> list[tuple[float, Level, int]]:
        """The contexts at the text's end that are in the tables, the shortest first: λ, the level that holds their
        successors, and the context's id."""
        context = list(context)[len(context) - min(len(context), self.order - 1) :]
        known = []
        for start in range(len(context) - 1, -1, -1):
            node = self._find(context[start:])
            if node is None:
                break  # nor was any longer one seen
            n = len(context) - start
            backoff = self.backoff[node] if n == 1 else self.levels[n - 2].backoff[node]
            known.append((float(backoff), self.levels[n - 1], node))
        return known

    def _behind(self, level: Level, node: int) -> tuple[int, int]:
        """The range of a context's successors in its level."""
        first, end = np.searchsorted(level.keys, (node * self.vocab_size, (node + 1) * self.vocab_size))
        return int(first), int(end)

    def _find(self, context: Sequence[int]) -> int | None:
        """The id of an n-gram, or None where it is not in the tables."""
        node = context[0]
        if not 0 <= node < self.vocab_size:
            return None
        for level, token in zip(self.levels, context[1:], strict=False):
            key = node * self.vocab_size + token
            node = int(np.searchsorted(level.keys, key))
            if not 0 <= token < self.vocab_size or node == len(level.keys) or level.keys[node] != key:
                return None
        return node

    @classmethod
    def empty(cls, vocab_size: int, sizes: Sequence[int]) -> "NGramModel":
        """Tables of the stored shapes, to be filled."""
        row = np.zeros(vocab_size, dtype=np.float32)
        levels = [
            Level(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))
            for size in sizes
        ]
        return cls(row, row.copy(), levels)

    def tensors(self) -> dict[str, Tensor]:
        """All tables by name, as stored in safetensors."""
        named = {"unigram": self.unigram, "backoff": self.backoff}
        for order, level in enumerate(self.levels, start=2):
            named |= {f"{order}.keys": level.keys, f"{order}.probs": level.probs, f"{order}.backoff": level.backoff}
        return {name: torch.from_numpy(array) for name, array in named.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "NGramModel":
        """The inverse of `tensors`.

        Raises:
            SpeculationError: a table is missing, has another length than its fellows, or is not what it should be.
        """
        named = {name: tensor.numpy() for name, tensor in tensors.items()}
        order = 1 + -(-(len(named) - 2) // 3)
        try:
            levels = [
                Level(*(named[f"{n}.{part}"] for part in ("keys", "probs", "backoff"))) for n in range(2, order + 1)
            ]
            model = cls(named["unigram"], named["backoff"], levels)
        except KeyError as error:
            raise SpeculationError(f"n-gram weights lack the table {error}; train the drafter again") from error
        model._check()
        return model

    def _check(self) -> None:
        """Refuse tables that could be read out of bounds or give something else than probabilities."""
        parents = self.vocab_size
        rows = [(self.unigram, self.backoff, parents)] + [(lv.probs, lv.backoff, len(lv.keys)) for lv in self.levels]
        good = all(len(probs) == len(backoff) == size for probs, backoff, size in rows)
        good &= all(np.isfinite(a).all() and (a >= 0).all() and (a <= 1).all() for row in rows for a in row[:2])
        for level in self.levels:
            keys = level.keys
            good &= bool((np.diff(keys) > 0).all()) and bool(((keys >= 0) & (keys < parents * self.vocab_size)).all())
            parents = len(keys)
        if not good:
            raise SpeculationError(
                "n-gram weights are damaged: their tables do not fit each other, or do not hold probabilities; "
                "train the drafter again"
            )


def _largest(values: np.ndarray, count: int) -> list[int]:
    """Places of the `count` largest, in descending order."""
    some = np.argpartition(values, -count)[-count:] if len(values) > count else np.arange(len(values))
    return [int(i) for i in some[np.argsort(-values[some])]]
