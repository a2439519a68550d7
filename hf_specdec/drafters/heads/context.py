"""`HeadContext`: what heads have read of each row, and what they have not."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ...protocol import DraftContext, Feature, Verdict
from ...target.cache import RaggedCache
from ...transfer import moved, to_device


class News(NamedTuple):
    """What heads have not read yet: N places, of which the first `counts` are each row's."""

    states: Tensor
    """[B, N, H] hidden states of the target, or whatever is read of it, side by side"""
    tokens: Tensor
    """[B, N] the token that the target chose from each state"""
    counts: Tensor
    """[B], at least 1"""
    first: Tensor
    """[B, 1] the position of each row's first slot: above 0 where the call went on from a cache"""

    def positions(self, cache: RaggedCache) -> Tensor:
        """[B, N] of the states, which stand behind what is in the cache."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.first + cache.slots.ends[:, None] + steps


class HeadContext:
    """A cache of the heads with one slot per state of the target; left padding has none. Rows may join others."""

    def __init__(
        self,
        context: DraftContext,
        features: Sequence[Feature],
        config: PreTrainedConfig,
        device: torch.device,
        again: int = 0,
    ) -> None:
        """
        Args:
            features: of the target's forwards, that are read side by side.
            config: whose layers the cache has.
            device: of the heads.
            again: slots at the end of each row that are read anew in every round, because drafted tokens filled them.
        """
        self.context, self.features, self.config, self.device, self.again = context, features, config, device, again
        self.rows: list[int] = []
        self.cache: RaggedCache | None = None
        self.cached: list[int] = []
        """rows of the cache, in its order"""
        self.read: dict[int, int] = {}
        """[row] slots that hold accepted tokens"""
        self._first: dict[int, int] = {}
        """[row] as in `News`"""
        self._states: list[Tensor] = []
        """[N, H] the target's, in pieces as they came"""
        self._unread: dict[int, list[int]] = {}
        """[row] which places of these pieces, one behind the other, have not been read"""

    @property
    def unread(self) -> int:
        """Places of the row that has most of them."""
        return max(map(len, self._unread.values()))

    @property
    def new(self) -> list[int]:
        """Rows that are not in the cache."""
        return [row for row in self.rows if row not in self.cached]

    @property
    def unopened(self) -> int:
        """Places of those."""
        return sum(len(self._unread[row]) for row in self.new)

    # ------------------------------------------------------------------ what the target has read

    def observe_prompt(self, verdict: Verdict) -> None:
        """Rows begin, or join those that are there: take the states of their prompts."""
        mask = self.context.prompt_mask
        columns = next(iter(verdict.features.values())).shape[1]
        for row, place in zip(verdict.rows, self._take(verdict), strict=True):
            length = columns if self.context.most_rows else int(mask[row].sum())
            count = min(length, columns)
            self._unread[row] = list(range(place + columns - count, place + columns))
            self._first[row], self.read[row] = length - count, 0
        self.rows += verdict.rows

    def observe(self, verdict: Verdict) -> None:
        """Take the states from which each row's new tokens were chosen."""
        self.follow(verdict.rows)
        for row, place, tokens in zip(verdict.rows, self._take(verdict), verdict.tokens, strict=True):
            self._unread[row] += range(place, place + len(tokens))

    def _take(self, verdict: Verdict) -> range:
        """Add the verdict's states [B, T, H] to the pieces; returns the place of each row's first."""
        before = sum(map(len, self._states))
        states = torch.cat([moved(verdict.features[name], self.device) for name in self.features], dim=-1)
        self._states.append(states.flatten(0, 1))
        return range(before, before + len(self._states[-1]), states.shape[1])

    def follow(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows."""
        if self.rows == list(rows):
            return
        gone = set(self.rows) - set(rows)
        self.rows = list(rows)
        for row in gone:
            del self._unread[row], self._first[row], self.read[row]
        if gone:
            self._keep(self._unread)

    def _keep(self, unread: dict[int, list[int]]) -> None:
        """Let go of all states but those of these places."""
        places = [place for row in unread.values() for place in row]
        states = torch.cat(self._states) if places else None
        self._states = [] if states is None else [states[to_device(places, states.device)]]
        ends = 0
        for row, mine in unread.items():
            self._unread[row] = list(range(ends, ends + len(mine)))
            ends += len(mine)

    # ------------------------------------------------------------------ what the heads read

    def over(self) -> RaggedCache:
        """The heads' cache, its rows rolled back to what counts. None of the rows is `new`, or all are."""
        if self.cache is None or len(self.new) == len(self.rows):
            self.cache = self.empty(len(self.rows))
        elif self.cached != self.rows:
            self._roll_back()
            place = {row: i for i, row in enumerate(self.cached)}
            self.cache.select([place[row] for row in self.rows])
        self.cached = list(self.rows)
        self._roll_back()
        return self.cache

    def empty(self, rows: int) -> RaggedCache:
        """A cache of so many rows of which nothing was read."""
        return RaggedCache.empty(DynamicCache(config=self.config), rows, self.device)

    def join(self, row: int, alone: RaggedCache) -> None:
        """A row that was read by itself stands in the cache, behind those that are there.

        Args:
            alone: what was read of it.
        """
        assert self.cache is not None, "it joins others"
        self._roll_back()
        alone.set_lengths([self.read[row]])
        there = [b for b, known in enumerate(self.cached) if known in self.rows]
        states = [*(self.cache.row(b) for b in there), alone.row(0)]
        self.cached = [*(self.cached[b] for b in there), row]
        self.cache.assemble(states, [self.read[known] for known in self.cached])

    def _roll_back(self) -> None:
        assert self.cache is not None
        self.cache.set_lengths([self.read.get(row, 0) for row in self.cached])

    def news(self, texts: Sequence[Sequence[int]], width: int = 0) -> News:
        """What has to be read now of all rows, padded to at least so many places. It counts as read from then on, but
        for the slots that are read again.

        Args:
            texts: [B] the rows' tokens, of which the last has no state yet.
        """
        return self._news(self.rows, texts, width, self.again)

    def news_of(self, row: int, text: Sequence[int]) -> News:
        """What has to be read of a row by itself. The last of it is read again, beside the others."""
        return self._news([row], [text], 0, max(self.again, 1))

    def _news(self, rows: Sequence[int], texts: Sequence[Sequence[int]], width: int, again: int) -> News:
        unread = [self._unread[row] for row in rows]
        counts = [len(mine) for mine in unread]
        width = max(width, *counts)
        states = torch.cat(self._states)
        states = states[to_device([_padded(mine, width) for mine in unread], states.device)]
        behind = [_padded(text[len(text) - n :], width) for text, n in zip(texts, counts, strict=True)]
        first = to_device([[self._first[row]] for row in rows], self.device)
        for row, mine in zip(rows, unread, strict=True):
            kept = min(again, len(mine))
            self.read[row] += len(mine) - kept
            self._unread[row] = mine[len(mine) - kept :]
        self._keep(self._unread)
        counted = to_device(counts, self.device)
        return News(moved(states, self.device), to_device(behind, self.device), counted, first)


def _padded(row: Sequence[int], width: int) -> list[int]:
    """Filled up with what comes first in it: a place of its own, whose states are numbers."""
    return [*row, *[row[0] if row else 0] * (width - len(row))]
