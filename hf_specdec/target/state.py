"""`StateRunner`: for models whose layers carry a recurrent state, which cannot be cut back to a shorter text.

A copy of the states is kept before each block. Where the whole block is accepted nothing more is done; after a
rejection the copy comes back and the accepted tokens are fed once more.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from ..protocol import Forward
from .lockstep import LockstepRunner


class LayerState(NamedTuple):
    """What one layer remembered."""

    conv: dict[int, Tensor | None]
    recurrent: dict[int, Tensor | None]


def keeps_state(cache: Cache) -> bool:
    """Whether a prefilled cache has layers that cannot be cropped, all of them with states that can be copied."""
    stuck = [layer for layer in cache.layers if not layer.is_croppable]
    return bool(stuck) and all(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in stuck)


class StateRunner(LockstepRunner):
    """Rows of equal length over a stock cache with states."""

    before: list[LayerState | None]
    """the layers' states before the last block"""
    fed: Tensor
    """the last block"""

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it."""
        answer = super().prefill()
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.record_past = False  # what a state has seen is not recorded, it is computed anew
        self.prompt_states = [_copied(layer) for layer in self.cache.layers]
        return answer

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        """Append tokens [B, T] to every row, a chain."""
        self.before, self.fed = [_copied(layer) for layer in self.cache.layers], tokens
        return super().forward(tokens, parents, counts)

    def truncate(self, lengths: list[int]) -> None:
        """Roll back to a common length within the last block."""
        width = self.fed.shape[1]
        kept = width - (self.length - lengths[0])
        if kept == width:
            self._trim(0)
            return
        for layer, state in zip(self.cache.layers, self.before, strict=True):
            if state is not None:
                _restore(layer, state)
        self._trim(width)
        self.length -= width
        if not self.is_simple:
            self.ids = self.ids[:, : self.ids.shape[1] - width]
        if kept:
            fed = self.fed[:, :kept]
            super().forward(fed)
            self._trim(0)

    def finish(self, ids: Tensor | None) -> None:
        """Leave the cache as plain decoding would; after an interrupt as it was behind the prompt."""
        if ids is None:
            for layer, state in zip(self.cache.layers, self.prompt_states, strict=True):
                if state is not None:
                    _restore(layer, state)
            self._trim(self.length - self.prompt_length)
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def _trim(self, removed: int) -> None:
        """Cut the attention part of the cache; it also trims what sliding layers recorded."""
        for layer in self.cache.layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.crop(-removed)
            elif isinstance(layer, DynamicLayer) and removed:  # a layer with both
                layer.keys, layer.values = layer.keys[:, :, :-removed], layer.values[:, :, :-removed]


def _copied(layer: object) -> LayerState | None:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return None
    return LayerState(*({i: None if x is None else x.clone() for i, x in states.items()}
                        for states in (layer.conv_states, layer.recurrent_states)))  # fmt: skip


def _restore(layer: LinearAttentionCacheLayerMixin, state: LayerState) -> None:
    """The tensors stay the same ones: they may have a static address."""
    for own, kept in ((layer.conv_states, state.conv), (layer.recurrent_states, state.recurrent)):
        for i, values in kept.items():
            if values is not None and own[i] is not None:
                own[i].copy_(values)
