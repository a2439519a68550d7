"""`OverCache`: what every draft model over a cache of its own can be asked."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...protocol import DraftContext, Sequences
from ...stats import SpeculationStats
from ...target.captured import Choose


@dataclass(frozen=True)
class DraftCall:
    """What a draft model over a cache is told of a call."""

    prompt_ids: Tensor
    """[B, P] left-padded, which it reads"""
    prompt_mask: Tensor
    """[B, P] 1 where that is not padding"""
    lockstep: bool
    """rows keep equal lengths"""
    most_rows: int = 0
    """where rows come and go, how many are expected at once; there is no prompt then"""
    most_tokens: int = 0
    """of those together"""
    source: dict[str, Any] | None = None
    """as in `DraftContext`, for a draft of an encoder-decoder"""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    """where its forwards are counted"""
    forwards: str = "eager"
    """as in `DraftContext`"""
    most_columns: int = 0
    """that the text may come to"""

    @classmethod
    def of(cls, context: DraftContext) -> "DraftCall":
        return cls(
            context.prompt_ids,
            context.prompt_mask,
            context.lockstep,
            context.most_rows,
            context.most_tokens,
            context.source,
            context.stats,
            context.forwards,
            context.max_length,
        )


class Picking(NamedTuple):
    """How the tokens of a chain are picked."""

    choose: Choose
    """from logits [B, V] and random numbers [B]: tokens [B] or [B, k], and more"""
    numbers: Tensor | None
    """[B, count]"""
    key: Hashable
    """equal where the same is chosen from the same"""


class OverCache(ABC):
    """A draft model over a cache, fed with accepted and drafted tokens, rolled back to what was accepted. Slots are
    columns of the target's `ids`. Rows may leave, come twice, or be new."""

    lockstep: bool
    """rows keep equal lengths"""
    device: torch.device
    """of the model"""
    context_limit: int
    """columns that the model can read"""
    good: list[int]
    """[B] leading slots that hold accepted tokens"""
    held: list[int]
    """[B] leading slots that hold the text, drafted tokens included"""
    stats: SpeculationStats
    """where its forwards are counted"""

    @abstractmethod
    def catch_up(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Feed the accepted tokens that the cache does not hold; logits [B, V] after the last one.

        Args:
            ids: [B, capacity], `lengths` columns of which count.
        """

    @abstractmethod
    def feed(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None = None) -> Tensor:
        """Feed what the cache does not hold of the first `lengths` columns of ids; logits [B, V] after the last one.

        Args:
            last: [B] the tokens there, where the cache holds all before them.
        """

    def places(self, ids: Tensor, lengths: Sequence[int], count: int) -> Tensor:
        """Feed what the cache does not hold of ids, which go on with count - 1 tokens behind `lengths` columns; logits
        [B, count, V] after the last of these columns and after each of the tokens, which are forgotten."""
        raise NotImplementedError

    chains: bool = False
    """whether `chain` can be asked"""

    def chain(self, first: Tensor, count: int, pick: Picking, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        """Feed one or two tokens [B, F], then what is picked behind them, so many steps in a row, as one recorded step.

        Args:
            lengths: [B] slots behind which they are fed, where the host does not know that yet. Then it `learns` it
                before it asks for anything else.

        Returns:
            What was picked: [B, count, ...] of each.
        """
        raise NotImplementedError

    def missing(self, ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """[B, F] what `catch_up` would feed, if that can begin a chain; else None."""
        return None

    def learns(self, lengths: list[int], count: int) -> None:
        """Behind texts of so many tokens, all fed, so many steps were made; the host had not known behind which."""
        raise NotImplementedError

    @abstractmethod
    def roll_back(self, good: list[int] | None = None) -> None:
        """Forget what was fed behind so many slots per row; behind the accepted ones, where none are given."""

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Go on with these rows; one that comes twice is a fork."""

    @abstractmethod
    def read(self, tokens: list[int]) -> None:
        """A row joins, with this text."""

    @property
    def fed(self) -> list[int]:
        """[B] slots behind the accepted ones, which hold drafted tokens."""
        return [held - good for held, good in zip(self.held, self.good, strict=True)]

    def accept(self, counts: Sequence[int], stopped: Sequence[bool]) -> None:
        """Of what was fed behind the accepted tokens the first `counts` stay."""
        kept = [min(n, k) for n, k in zip(counts, self.fed, strict=True)]
        if self.lockstep:
            kept = [min((n for n, out in zip(kept, stopped, strict=True) if not out), default=0)] * len(kept)
        self.roll_back([good + n for good, n in zip(self.good, kept, strict=True)])

    def follow(self, before: list[int], sequences: Sequences) -> bool:
        """Forget what was not accepted, and go on with the rows that are here now: those of `before`, and new ones.
        Whether there were any, whose text had to be read."""
        self.roll_back()
        place = {row: i for i, row in enumerate(before)}
        new = [b for b, row in enumerate(sequences.rows) if row not in place]
        for b in new:
            self.read(sequences.tokens[b])
        place |= {sequences.rows[b]: i for i, b in enumerate(new, start=len(before))}
        if sequences.rows != list(place):
            self.select([place[row] for row in sequences.rows])
        return bool(new)
