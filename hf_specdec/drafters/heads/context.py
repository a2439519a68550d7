"""`HeadContext`: what heads have read of each row, and what they have not."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ...protocol import DraftContext, Verdict
from ...target.cache import RaggedCache
from ...transfer import moved, to_device


class News(NamedTuple):
    """What heads have not read yet: N places, of which the first `counts` are each row's."""

    states: Tensor
    """[B, N, H] hidden states of the target; where several layers are read, side by side"""
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
    """A cache of the heads with one slot per state of the target; left padding has none."""

    def __init__(
        self,
        context: DraftContext,
        layers: Sequence[int],
        config: PreTrainedConfig,
        device: torch.device,
        again: int = 0,
    ) -> None:
        """
        Args:
            layers: indexes of the hidden states that are read.
            config: of the heads, whose layers the cache has.
            device: of the heads.
            again: slots at the end of each row that are read anew in every round, because drafted tokens filled them.
        """
        self.context, self.layers, self.config, self.device, self.again = context, layers, config, device, again
        self.rows: list[int] = []
        self.cache: RaggedCache | None = None
        self.read: list[int] = []
        """[B] slots that hold accepted tokens"""
        self.first: Tensor
        """[B, 1] as in `News`"""
        self._states: list[Tensor] = []
        """[B, T, H] the target's, in pieces as they came"""
        self._unread: list[list[int]] = []
        """[B] which places of these pieces, side by side, have not been read"""
        self._tokens: list[list[int]] = []
        """[B] the tokens chosen there"""

    @property
    def unread(self) -> int:
        """Places of the row that has most of them."""
        return max(map(len, self._unread))

    def observe_prompt(self, verdict: Verdict) -> None:
        """Take the prompt's states, each with the token behind it."""
        states, first = self._joined(verdict), []
        prompt, mask = self.context.prompt_ids, self.context.prompt_mask
        for row, tokens in zip(verdict.rows, verdict.tokens, strict=True):
            length = int(mask[row].sum())
            count = min(length, states.shape[1])
            self._unread.append(list(range(states.shape[1] - count, states.shape[1])))
            self._tokens.append([*prompt[row, prompt.shape[1] - count + 1 :].tolist(), *tokens[:1]])
            first.append([length - count])
        self.rows, self.read, self._states = list(verdict.rows), [0] * len(first), [states]
        self.first = to_device(first, self.device)

    def observe(self, verdict: Verdict) -> None:
        """Take the states from which each row's new tokens were chosen."""
        self.follow(verdict.rows)
        before = sum(states.shape[1] for states in self._states)
        self._states.append(self._joined(verdict))
        for b, tokens in enumerate(verdict.tokens):
            self._unread[b] += range(before, before + len(tokens))
            self._tokens[b] += tokens

    def _joined(self, verdict: Verdict) -> Tensor:
        return torch.cat([verdict.features[layer] for layer in self.layers], dim=-1)

    def follow(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows."""
        order = [self.rows.index(row) for row in rows]
        if order == list(range(len(self.rows))):
            return
        if self.cache is not None:
            self.cache.set_lengths(self.read)
            self.cache.select(order)
        self.rows, self.read = list(rows), [self.read[b] for b in order]
        self._unread, self._tokens = [self._unread[b] for b in order], [self._tokens[b] for b in order]
        index = to_device(order, self.device)
        self.first, self._states = self.first[index], [states[moved(index, states.device)] for states in self._states]

    def over(self) -> RaggedCache:
        """The heads' cache, its rows rolled back to what counts."""
        if self.cache is None:
            self.cache = RaggedCache.empty(DynamicCache(config=self.config), len(self.rows), self.device)
        self.cache.set_lengths(self.read)
        return self.cache

    def news(self, width: int = 0) -> News:
        """What has to be read now, padded to at least so many places. It counts as read from then on, but for the slots
        that are read again."""
        counts = [len(tokens) for tokens in self._tokens]
        width = max(width, *counts)
        states = torch.cat(self._states, 1)
        places = [_padded(row, width) for row in self._unread]
        states = states.gather(1, to_device(places, states.device)[..., None].expand(-1, -1, states.shape[2]))
        tokens = to_device([_padded(row, width) for row in self._tokens], self.device)
        kept = [min(self.again, count) for count in counts]
        start = min(count - n for count, n in zip(counts, kept, strict=True))
        self._states = [states[:, start : max(counts)].clone()] if self.again else []
        self._unread = [list(range(count - n - start, count - start)) for count, n in zip(counts, kept, strict=True)]
        self._tokens = [row[len(row) - n :] for row, n in zip(self._tokens, kept, strict=True)]
        self.read = [read + count - n for read, count, n in zip(self.read, counts, kept, strict=True)]
        return News(moved(states, self.device), tokens, to_device(counts, self.device), self.first)


def _padded(row: list[int], width: int) -> list[int]:
    """Filled up with what comes first in it: a place of its own, whose states are numbers."""
    return row + (row[:1] or [0]) * (width - len(row))
