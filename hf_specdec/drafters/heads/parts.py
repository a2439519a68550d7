"""What heads are made of: embeddings, masks, places of a block, and logits."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.inputs import position_limit
from ...target.masks import as_bias, attention_windows
from ...transfer import moved
from .head import News


def embedded(table: Any, tokens: Tensor) -> Tensor:
    """e of tokens, by the rows of a table alone: heads are trained without what some targets do beside it, such as to
    scale them."""
    tokens = moved(tokens, input_device(table))
    return table(tokens) if type(table) is nn.Embedding else nn.functional.embedding(tokens, table.weight)


def windows_within(model: Any, target: Any) -> dict[str, int | None]:
    """The attention window of each kind of layer. Where the target's text may grow longer than those that a head was
    made for, no wider than these: it goes on by distances that it knows."""
    windows, limit = attention_windows(model), position_limit(model)
    if limit >= position_limit(target):
        return windows
    return {kind: min(window or limit, limit) for kind, window in windows.items()}


def masks_at(
    slots: Tensor, cache: RaggedCache, windows: dict[str, int | None], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Additive masks [B, 1, T, S] by the kind of layer, where tokens at these slots [B, T] see all up to themselves,
    within each kind's window."""
    distance = slots[:, :, None] - torch.arange(cache.slots.end, device=slots.device)
    return {kind: _mask(distance >= 0, distance, window, dtype) for kind, window in windows.items()}


def _mask(allowed: Tensor, distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    return as_bias(allowed, distance, {"": window}, dtype)  # type: ignore[return-value]


def over_vocabulary(known: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """[B, V] logits, of which [B, K] are known, those of tokens [K] or [B, K]. All others are the lowest there is."""
    lowest = known.new_full((len(known), vocab_size), torch.finfo(known.dtype).min)
    return lowest.scatter(1, tokens.expand(len(known), -1), known)


class Block(NamedTuple):
    """L places behind each row's news that are filled at once, of which the first is its last token's."""

    allowed: Tensor
    """[B, L, S] what they see: all that the row has read, and each other"""
    distance: Tensor
    """[B, L, S] how far back each slot lies; below 0 for what comes behind"""
    positions: Tensor
    """[B, L]"""

    @classmethod
    def behind(cls, news: News, cache: RaggedCache, length: int) -> "Block":
        """Slots for the news and for so many places are reserved."""
        width = news.tokens.shape[1]
        cache.reserve(width + length)
        # A row's slots: what it held, its news, those of longer rows, the block.
        slots = torch.arange(cache.slots.end, device=news.tokens.device)
        known, start = (cache.slots.ends + news.counts)[:, None], (cache.slots.ends + width)[:, None]
        inside = (slots >= start) & (slots < start + length)
        places = torch.where(inside, known + slots - start, slots)  # without those of longer rows
        own = known + torch.arange(length, device=slots.device)
        distance = own[:, :, None] - places[:, None]
        allowed = ((slots < known) | inside)[:, None].expand_as(distance)
        return cls(allowed, distance, news.first + own)

    def masks(
        self, windows: dict[str, int | None], causal: Collection[str], dtype: torch.dtype, one_window: bool = False
    ) -> dict[str, Tensor]:
        """Additive masks [B, 1, L, S] by the kind of layer. Windows reach to both sides.

        Args:
            causal: kinds of layers that see nothing behind a place.
            one_window: whether the block has one window, that of its first place, and is seen by itself as far as
                nothing else is against it.
        """
        seen = {kind: self.allowed & (self.distance >= 0) if kind in causal else self.allowed for kind in windows}
        far = self.distance[:, :1].clamp(min=0).expand_as(self.distance) if one_window else self.distance.abs()
        return {kind: _mask(seen[kind], far, window, dtype) for kind, window in windows.items()}
