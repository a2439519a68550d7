"""What sessions of all heads have in common: `HeadContext`, what they have read of each row, and `Drawn`, a draft."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ...errors import SpeculationError
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...target.cache import RaggedCache
from ...transfer import to_device
from ..draft_model.model_draft import with_room, write_tokens


def check_attention(config: PreTrainedConfig) -> None:
    """Refuse kernels that do not take masks of rows of different lengths.

    Raises:
        SpeculationError: with what to load the heads with.
    """
    kind = config._attn_implementation
    if kind not in (None, "eager", "sdpa"):
        raise SpeculationError(
            f"the heads use {kind!r} attention, which does not support rows of different lengths; load their "
            'model with attn_implementation="sdpa"'
        )


class News(NamedTuple):
    """What heads have not read yet: at most N places, of which `counts` are each row's."""

    states: Tensor
    """[B, N, H] hidden states of the target; where several layers are read, side by side"""
    tokens: Tensor
    """[B, N] the token that the target chose from each state"""
    counts: list[int]
    positions: Tensor
    """[B, N] positions of the states"""


class HeadContext:
    """A cache of the heads with one slot per state of the target; left padding has none."""

    def __init__(self, context: DraftContext, layers: Sequence[int], again: int = 0) -> None:
        """
        Args:
            layers: indexes of the hidden states that are read.
            again: slots at the end of each row that are read anew in every round, because drafted tokens filled them.
        """
        self.context, self.layers, self.again = context, layers, again
        self.rows: list[int] = []
        self.cache: RaggedCache | None = None
        self.read: list[int] = []
        """[B] slots that hold accepted tokens"""
        self.first: list[int] = []
        """[B] the position of each row's first slot: above 0 where the call went on from a cache"""
        self._states: list[list[Tensor]] = []
        """[B] states that have not been read, in pieces as they came"""
        self._tokens: list[list[int]] = []

    def observe_prompt(self, verdict: Verdict) -> None:
        """Take the prompt's states, each with the token behind it."""
        states = self._joined(verdict)
        prompt, mask = self.context.prompt_ids, self.context.prompt_mask
        self.rows = list(verdict.rows)
        for b, (row, tokens) in enumerate(zip(verdict.rows, verdict.tokens, strict=True)):
            length = int(mask[row].sum())
            count = min(length, states.shape[1])
            self._states.append([states[b, states.shape[1] - count :]])
            self._tokens.append([*prompt[row, prompt.shape[1] - count + 1 :].tolist(), *tokens[:1]])
            self.first.append(length - count)
        self.read = [0] * len(self.rows)

    def observe(self, verdict: Verdict) -> None:
        """Take the states from which each row's new tokens were chosen."""
        states = self._joined(verdict)
        for b, (row, tokens) in enumerate(zip(verdict.rows, verdict.tokens, strict=True)):
            here = self.rows.index(row)
            self._states[here].append(states[b, : len(tokens)])
            self._tokens[here] += tokens

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
        self.first, self._tokens = [self.first[b] for b in order], [self._tokens[b] for b in order]
        self._states = [self._states[b] for b in order]

    def news(self, device: torch.device) -> News:
        """What has to be read now. It counts as read from then on, but for the slots that are read again."""
        counts = [len(tokens) for tokens in self._tokens]
        width = max(counts)
        starts = to_device([first + read for first, read in zip(self.first, self.read, strict=True)], device)
        whole = [torch.cat(pieces) for pieces in self._states]
        states = torch.stack([torch.nn.functional.pad(s, (0, 0, 0, width - len(s))) for s in whole])
        tokens = to_device([row + [0] * (width - len(row)) for row in self._tokens], device)
        positions = starts[:, None] + torch.arange(width, device=device)
        found = News(states.to(device), tokens, counts, positions)
        self._states = [[s[len(s) - min(self.again, len(s)) :].clone()] for s in whole]
        self._tokens = [row[len(row) - min(self.again, len(row)) :] for row in self._tokens]
        return found

    def over(self, config: PreTrainedConfig, device: torch.device) -> RaggedCache:
        """The heads' cache, its rows rolled back to what counts."""
        if self.cache is None:
            self.cache = RaggedCache.empty(DynamicCache(config=config), len(self.rows), device)
        self.cache.set_lengths(self.read)
        return self.cache

    def advance(self, counts: Sequence[int]) -> None:
        """Count so many places of each row as read."""
        kept = map(len, self._tokens)
        self.read = [read + count - again for read, count, again in zip(self.read, counts, kept, strict=True)]


class HeadSession(DraftSession):
    """A session of heads, which read the target's hidden states."""

    def __init__(self, context: DraftContext, layers: Sequence[int], again: int = 0) -> None:
        """
        Args:
            layers, again: as of `HeadContext`.
        """
        super().__init__(context)
        self.features, self.read = layers, HeadContext(context, layers, again)

    def observe_prompt(self, verdict: Verdict) -> None:
        self.read.observe_prompt(verdict)

    def observe(self, verdict: Verdict) -> None:
        self.read.observe(verdict)


class Drawn:
    """Builds a draft token by token: each is drawn through the call's processors, and its q is kept."""

    def __init__(self, context: DraftContext, sequences: Sequences, room: list[int], most: int) -> None:
        """
        Args:
            most: tokens that will be drawn per row, at most.
        """
        self.context, self.sequences, self.room = context, sequences, room
        self.tokens: list[Tensor] = []
        """[B] each"""
        self._q: list[Tensor] = []
        self._ids = with_room(sequences, most)

    def draw(self, logits: Tensor) -> None:
        """One more token per row, from logits [B, V]."""
        lengths = [n + len(self.tokens) for n in self.sequences.lengths]
        tokens, q = self.context.pick(self._ids, lengths, self.sequences.rows, logits.to(self.context.device))
        write_tokens(self._ids, tokens, lengths)
        self.tokens.append(tokens)
        if q is not None:
            self._q.append(q)

    def draft(self) -> Draft:
        """The drawn tokens, as far as each row has room for them."""
        lengths = [min(len(self.tokens), most) for most in self.room]
        return Draft(torch.stack(self.tokens, 1), lengths, q=torch.stack(self._q, 1) if self._q else None)
