"""`RaggedCache`: keys and values of a batch whose rows have different lengths.

Every layer has one buffer for keys and one for values, [B, heads, capacity, head size], which grows in blocks. A row
owns the slots below its length. A forward of T tokens writes to the T slots after each row's length; a smaller length
is a rollback, and `keep` moves an accepted tree path next to the rest.
"""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 256
"""slots by which a full buffer grows"""


def is_adoptable(cache: object) -> bool:
    """Whether every layer is plain attention, possibly with a sliding window."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers; the slots to write to are the cache's."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: "RaggedCache", keys: Tensor, values: Tensor, sliding_window: int | None) -> None:
        self.cache, self.keys, self.values, self.sliding_window = cache, keys, values, sliding_window
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, head size] after each row's length; returns all visible slots."""
        end = self.cache.end
        if end > self.keys.shape[2]:
            more = -(-(end - self.keys.shape[2]) // BLOCK) * BLOCK
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))
        rows, slots = (index.to(key_states.device) for index in self.cache.places)
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """Takes over the contents of a stock cache after a prefill of P columns (left padding included)."""

    def __init__(self, stock: Cache) -> None:
        """
        Args:
            stock: a cache that `is_adoptable`. Its tensors are copied; it is left as it is.
        """
        columns = stock.get_seq_length()
        self.lengths = [columns] * stock.layers[0].keys.shape[0]
        layers = [
            RaggedLayer(self, _buffer(layer.keys, columns), _buffer(layer.values, columns), _window(layer))
            for layer in stock.layers
        ]
        super().__init__(layers=layers)
        self.device = layers[0].keys.device
        self._refresh()

    def _refresh(self) -> None:
        self.lengths_tensor = torch.tensor(self.lengths, device=self.device)
        self.row_index = torch.arange(len(self.lengths), device=self.device)[:, None]

    def reserve(self, width: int) -> None:
        """Say where the next forward, of `width` tokens per row, writes to."""
        self.places, self.end = self.slots(width), max(self.lengths) + width

    def slots(self, width: int) -> tuple[Tensor, Tensor]:
        """Row index [B, 1] and slot index [B, width] of the `width` slots after each row's length."""
        return self.row_index, self.lengths_tensor[:, None] + torch.arange(width, device=self.device)

    def set_lengths(self, lengths: list[int]) -> None:
        """Advance or roll back, one length per row."""
        self.lengths = lengths
        self._refresh()

    def keep(self, paths: list[list[int]]) -> None:
        """Move the slots `length + i`, i in a row's path (increasing), to follow directly after the row's length."""
        width = max(map(len, paths), default=0)
        if all(path == list(range(len(path))) for path in paths):
            return
        # A short path is filled up with slots that move onto themselves.
        source = [path + list(range(len(path), width)) for path in paths]
        rows, target = self.slots(width)
        origin = self.lengths_tensor[:, None] + torch.tensor(source, device=self.device)
        for layer in self.layers:
            device = layer.keys.device
            r, t, o = rows.to(device), target.to(device), origin.to(device)
            layer.keys[r, :, t] = layer.keys[r, :, o]
            layer.values[r, :, t] = layer.values[r, :, o]

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch only."""
        for layer in self.layers:
            index = torch.tensor(rows, dtype=torch.long, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        self.set_lengths([self.lengths[row] for row in rows])

    def row(self, b: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of one row's keys and values [heads, length, head size], layer by layer."""
        end = self.lengths[b]
        return [(layer.keys[b, :, :end].clone(), layer.values[b, :, :end].clone()) for layer in self.layers]

    def assemble(self, rows: list[list[tuple[Tensor, Tensor]]], lengths: list[int]) -> None:
        """The opposite of `row`: hold these rows."""
        end = max(lengths)
        for i, layer in enumerate(self.layers):
            keys, values = zip(*(row[i] for row in rows), strict=True)
            layer.keys, layer.values = (
                torch.stack([torch.nn.functional.pad(t, (0, 0, 0, end - t.shape[1])) for t in states])
                for states in (keys, values)
            )
        self.set_lengths(lengths)

    def restore(self, stock: DynamicCache, length: int) -> None:
        """Write the first `length` slots of every row back into the stock cache, laid out as plain decoding does."""
        for layer, own in zip(stock.layers, self.layers, strict=True):
            start = max(0, length - own.sliding_window + 1) if own.sliding_window else 0
            layer.keys = own.keys[:, :, start:length].clone()
            layer.values = own.values[:, :, start:length].clone()
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length


def _window(layer: CacheLayerMixin) -> int | None:
    return getattr(layer, "sliding_window", None)


def _buffer(states: Tensor, columns: int) -> Tensor:
    """A buffer with room for a block more, the states at the end of its first `columns` slots (a sliding layer holds
    only the last ones; the slots before are never visible)."""
    batch, heads, length, size = states.shape
    buffer = states.new_zeros(batch, heads, columns + BLOCK, size)
    buffer[:, :, columns - length : columns] = states
    return buffer
