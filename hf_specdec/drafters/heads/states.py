"""`States`: what heads have read of each row, and what they have not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from ...protocol import DraftContext, Verdict
from ...target.cache import RaggedCache
from ...transfer import moved, to_device
from .head import Head, News


@dataclass
class HeadRow:
    """Of the call, that is decoded."""

    first: int
    """the position of its first slot"""
    unread: list[int]
    """places that have not been read, among all states that the target has told, one behind the other"""
    read: int = 0
    """slots that hold accepted tokens"""


class States:
    """A cache of the heads with one slot per state of the target; left padding has none. Rows may join others."""

    def __init__(self, context: DraftContext, head: Head) -> None:
        self.context, self.head = context, head
        self.rows: dict[int, HeadRow] = {}
        self.cache: RaggedCache | None = None
        self.cached: list[int] = []
        """rows of the cache, in its order"""
        self._told: list[Tensor] = []
        """[N, H] the target's, in pieces as they came"""

    @property
    def unread(self) -> int:
        """Places of the row that has most of them."""
        return max(len(row.unread) for row in self.rows.values())

    @property
    def new(self) -> list[int]:
        """Rows that are not in the cache."""
        return [row for row in self.rows if row not in self.cached]

    @property
    def unopened(self) -> int:
        """Places of those."""
        return sum(len(self.rows[row].unread) for row in self.new)

    # ------------------------------------------------------------------ what the target has read

    def observe_prompt(self, verdict: Verdict) -> None:
        """Rows begin, or join those that are there: take the states of their prompts."""
        mask = self.context.prompt_mask
        columns = next(iter(verdict.features.values())).shape[1]
        for row, place in zip(verdict.rows, self._take(verdict), strict=True):
            length = columns if self.context.most_rows else int(mask[row].sum())
            count = min(length, columns)
            self.rows[row] = HeadRow(length - count, list(range(place + columns - count, place + columns)))

    def observe(self, verdict: Verdict) -> None:
        """Take the states from which each row's new tokens were chosen."""
        self.follow(verdict.rows)
        for row, place, tokens in zip(verdict.rows, self._take(verdict), verdict.tokens, strict=True):
            self.rows[row].unread += range(place, place + len(tokens))

    def _take(self, verdict: Verdict) -> range:
        """Add the verdict's states [B, T, H] to the pieces; returns the place of each row's first."""
        before = sum(map(len, self._told))
        states = torch.cat([moved(verdict.features[name], self.head.device) for name in self.head.features], dim=-1)
        self._told.append(states.flatten(0, 1))
        return range(before, before + len(self._told[-1]), states.shape[1])

    def follow(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows."""
        if list(self.rows) == list(rows):
            return
        before, self.rows = self.rows, {row: self.rows[row] for row in rows}
        if len(self.rows) < len(before):
            self._forget()

    def _forget(self) -> None:
        """All states that were read."""
        places = [place for row in self.rows.values() for place in row.unread]
        states = torch.cat(self._told) if places else None
        self._told = [] if states is None else [states[to_device(places, states.device)]]
        end = 0
        for row in self.rows.values():
            row.unread = list(range(end, end + len(row.unread)))
            end += len(row.unread)

    # ------------------------------------------------------------------ what the heads read

    def over(self) -> RaggedCache:
        """The heads' cache, its rows rolled back to what counts. None of the rows is `new`, or all are."""
        rows = list(self.rows)
        if self.cache is None or len(self.new) == len(rows):
            self.cache = self.empty(len(rows))
        elif self.cached != rows:
            self._roll_back()
            self.cache.select([self.cached.index(row) for row in rows])
        self.cached = rows
        self._roll_back()
        return self.cache

    def empty(self, rows: int) -> RaggedCache:
        """A cache of so many rows of which nothing was read."""
        return RaggedCache.empty(DynamicCache(config=self.head.held), rows, self.head.device)

    def join(self, row: int, alone: RaggedCache) -> None:
        """A row that was read by itself stands in the cache, behind those that are there.

        Args:
            alone: what was read of it.
        """
        assert self.cache is not None, "it joins others"
        self._roll_back()
        alone.set_lengths([self.rows[row].read])
        there = [b for b, known in enumerate(self.cached) if known in self.rows]
        states = [*(self.cache.row(b) for b in there), alone.row(0)]
        self.cached = [*(self.cached[b] for b in there), row]
        self.cache.assemble(states, [self.rows[known].read for known in self.cached])

    def _roll_back(self) -> None:
        assert self.cache is not None
        self.cache.set_lengths([self.rows[row].read if row in self.rows else 0 for row in self.cached])

    def news(self, texts: Sequence[Sequence[int]], width: int = 0) -> News:
        """What has to be read now of all rows, padded to at least so many places. It counts as read from then on, but
        for the slots that are read again.

        Args:
            texts: [B] the rows' tokens, of which the last has no state yet.
        """
        return self._news(list(self.rows.values()), texts, width, self.head.again)

    def news_of(self, row: int, text: Sequence[int]) -> News:
        """What has to be read now of a row by itself. Its end is read again beside the others, as after any round."""
        return self._news([self.rows[row]], [text], 0, self.head.again + 1)

    def _news(self, rows: Sequence[HeadRow], texts: Sequence[Sequence[int]], width: int, again: int) -> News:
        counts = [len(row.unread) for row in rows]
        width = max(width, *counts)
        told = [
            [row.first, n, *_padded(row.unread, width), *_padded(text[len(text) - n :], width)]
            for row, text, n in zip(rows, texts, counts, strict=True)
        ]
        states, numbers = torch.cat(self._told), to_device(told, self.head.device)  # all in one transfer
        first, reads, places, tokens = numbers.split([1, 1, width, width], 1)
        states = states[moved(places, states.device)]
        for row, count in zip(rows, counts, strict=True):
            kept = min(again, count)
            row.read += count - kept
            row.unread = row.unread[count - kept :]
        self._forget()
        return News(moved(states, numbers.device), tokens, reads[:, 0], first)


def _padded(row: Sequence[int], width: int) -> list[int]:
    """Filled up with what comes first in it: a place of its own, whose states are numbers."""
    return [*row, *[row[0] if row else 0] * (width - len(row))]
