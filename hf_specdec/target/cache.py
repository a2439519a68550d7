"""`RaggedCache`: keys and values of a batch whose rows have different lengths.

Every layer has one buffer for keys and one for values, [B, heads, capacity, head size], which grows in blocks. A row
owns the slots below its length. A forward of T tokens writes to the T slots after each row's length; a smaller length
is a rollback, and `keep` moves an accepted tree path next to the rest.

Layers stand in groups, each with lengths of its own, so that upper layers can hold slots that lower ones do not. What
is left of pruned nodes lies behind the lengths, and is written over.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..transfer import moved, to_device

BLOCK = 64
"""slots by which a full buffer grows"""


def holding(cache: Any) -> list[Any]:
    """The layers that hold something: without the last ones of models whose upper layers read what lower ones hold
    (Gemma 4), for which transformers puts empty ones there."""
    layers = list(getattr(cache, "layers", []))
    while layers and type(layers[-1]).__name__ == "DummyLayer":
        layers.pop()
    return layers


def is_adoptable(cache: object) -> bool:
    """Whether every layer is plain attention, possibly with a sliding window."""
    layers = holding(cache)
    return bool(layers) and set(map(type, layers)) <= {DynamicLayer, DynamicSlidingWindowLayer}


def stay(paths: Sequence[Sequence[int]]) -> bool:
    """Whether all kept tokens stand where they are to stand."""
    return all(list(path) == list(range(len(path))) for path in paths)


def filled_up(paths: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Paths of one length: short ones with slots that move onto themselves."""
    return [[*path, *range(len(path), width)] for path in paths]


class Slots:
    """Where the rows of a group of layers stand, and where their next forward writes to."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.device = device
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Advance or roll back, one length per row."""
        self.lengths = lengths
        self.ends = to_device(lengths, self.device)
        """[B] the same on the device"""
        self.row_index = torch.arange(len(lengths), device=self.device)[:, None]

    def reserve(self, width: int) -> None:
        """The next forward has `width` tokens per row. Where all rows have one length its places are a block, and
        `places` is None."""
        self.end = max(self.lengths) + width
        self.places = None if len(set(self.lengths)) == 1 else self.after(width)

    def write_to(self, places: Tensor) -> None:
        """The next forward writes to these slots [B, T] of those that are reserved."""
        self.places = self.row_index, places

    def advance(self, width: int) -> None:
        """Every row has `width` more; the device need not be told by the host."""
        self.lengths = [length + width for length in self.lengths]
        self.ends = self.ends + width

    def after(self, width: int) -> tuple[Tensor, Tensor]:
        """Row index [B, 1] and slot index [B, width] of the `width` slots after each row's length."""
        return self.row_index, self.ends[:, None] + torch.arange(width, device=self.device)


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers; the slots to write to are its group's."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor, like: CacheLayerMixin) -> None:
        """
        Args:
            like: a stock layer in whose place it is.
        """
        self.slots, self.keys, self.values, self.is_initialized = slots, keys, values, True
        self.sliding_window = getattr(like, "sliding_window", None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, head size] after each row's length; returns all visible slots."""
        end = self.slots.end
        if self.keys.shape[3] == 0:
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        if end > self.keys.shape[2]:
            more = -(-(end - self.keys.shape[2]) // BLOCK) * BLOCK
            self.keys, self.values = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
        alive = len(self.slots.lengths)
        keys, values = self.keys[:alive, :, :end], self.values[:alive, :, :end]
        if self.slots.places is None:  # a block is written faster than single places
            start = self.slots.lengths[0]
            keys[:, :, start:], values[:, :, start:] = key_states, value_states
        else:
            self.write(self.slots.places, keys, key_states)
            self.write(self.slots.places, values, value_states)
        return keys, values

    @staticmethod
    def write(places: tuple[Tensor, Tensor], buffer: Tensor, states: Tensor) -> None:
        """Put states [B, heads, T, size] at these places of a buffer [B, heads, slots, size]."""
        rows, slots = (moved(index, states.device) for index in places)
        buffer[rows, :, slots] = states.transpose(1, 2).to(buffer.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.slots.lengths)

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """Takes over the contents of a stock cache after a prefill of P columns (left padding included)."""

    visible: Tensor
    """[B, any] which of the first slots each row sees: not its padding"""
    offset: Tensor
    """[B, 1] what is added to a slot to get its position"""

    def __init__(self, stock: Cache) -> None:
        """
        Args:
            stock: a cache that `is_adoptable`. Its tensors are taken out of it layer by layer, so that they are never
                held twice; `restore` puts them back.
        """
        columns = stock.get_seq_length()
        first = stock.layers[0].keys
        slots = Slots([columns] * first.shape[0], first.device)
        layers = []
        for layer in holding(stock):
            keys, layer.keys = _buffer(layer.keys, columns), nothing(layer.keys)
            values, layer.values = _buffer(layer.values, columns), nothing(layer.values)
            layers.append(RaggedLayer(slots, keys, values, layer))
        super().__init__(layers=layers)
        self.device, self.groups = slots.device, [slots]
        self.show(*sees_all(len(first), self.device))

    @classmethod
    def empty(cls, stock: Cache, rows: int, device: torch.device) -> "RaggedCache":
        """Nothing read yet. What a slot takes is seen from the first forward.

        Args:
            stock: an unused cache of the same model, which knows its layers.
        """
        cache = cls.__new__(cls)
        slots, nothing = Slots([0] * rows, device), torch.empty(rows, 0, 0, 0, device=device)
        layers = [RaggedLayer(slots, nothing, nothing, layer) for layer in holding(stock)]
        Cache.__init__(cache, layers=layers)
        cache.device, cache.groups = device, [slots]
        cache.show(*sees_all(rows, device))
        return cache

    @property
    def slots(self) -> Slots:
        """Of the lowest layers."""
        return self.groups[0]

    @property
    def lengths(self) -> list[int]:
        return self.slots.lengths

    def split(self, first: int) -> Slots:
        """Let the layers from `first` on have lengths of their own; returns their group."""
        group = Slots(list(self.layers[first].slots.lengths), self.device)
        for layer in self.layers[first:]:
            layer.slots = group
        self.groups = list({id(layer.slots): layer.slots for layer in self.layers}.values())
        return group

    def show(self, visible: Tensor, offset: Tensor) -> None:
        """Let `visible` and `offset` be these."""
        self.visible, self.offset = visible, offset

    @property
    def rows(self) -> int:
        """Of what layers are given."""
        return len(self.lengths)

    def tell(self) -> None:
        """Let the device know where rows stand; here it does."""

    def reserve(self, width: int) -> None:
        """Say where the next forward, of `width` tokens per row, writes to."""
        for group in self.groups:
            group.reserve(width)

    def set_lengths(self, lengths: list[int]) -> None:
        """Advance or roll back all layers, one length per row."""
        for group in self.groups:
            if lengths != group.lengths:  # to tell the device is to copy
                group.set_lengths(list(lengths))

    def keep(self, paths: Sequence[Sequence[int]], group: Slots | None = None) -> None:
        """Move the slots `length + i`, i in a row's path (increasing), to follow directly after the row's length, in
        the layers of a group or in all."""
        width = max(map(len, paths), default=0)
        if stay(paths):
            return
        offsets = to_device(filled_up(paths, width), self.device)
        for layer in self.layers:
            if group in (None, layer.slots):
                device = layer.keys.device
                rows, target = layer.slots.after(width)
                r, t, o = (moved(x, device) for x in (rows, target, layer.slots.ends[:, None] + offsets))
                layer.keys[r, :, t] = layer.keys[r, :, o]
                layer.values[r, :, t] = layer.values[r, :, o]

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        index = to_device(rows, self.device)
        for layer in self.layers:
            mine = moved(index, layer.keys.device)
            layer.keys, layer.values = layer.keys[mine], layer.values[mine]
        self.show(self.visible[index], self.offset[index])
        for group in self.groups:
            group.set_lengths([group.lengths[row] for row in rows])

    def lay_out(self, rows: int, slots: int) -> None:
        """Make buffers for so many rows of so many slots, in which rows can come and go; what counts is kept."""
        alive, end = len(self.lengths), max(self.lengths, default=0)
        for layer in self.layers:
            layer.keys, layer.values = (
                pad(states[:alive, :, :end], (0, 0, 0, slots - end, 0, 0, 0, rows - alive))
                for states in (layer.keys, layer.values)
            )

    def join(self, stock: Cache) -> None:
        """One more row, in buffers that have room for it: what a cache of one row holds. It is emptied."""
        b, columns = len(self.lengths), stock.get_seq_length()
        for layer, other in zip(self.layers, holding(stock), strict=True):
            held = slice(columns - other.keys.shape[2], columns)  # of sliding layers the last ones
            layer.keys[b, :, held], layer.values[b, :, held] = other.keys[0], other.values[0]
            other.keys, other.values = nothing(other.keys), nothing(other.values)
        below = (0, 0, 0, 1)  # it sees all, and is not shifted
        self.show(pad(self.visible[:b], below, value=True), pad(self.offset[:b], below))
        for group in self.groups:
            group.set_lengths([*group.lengths, columns])

    def leave(self, rows: Sequence[int]) -> list[int]:
        """These rows go, and the last ones take their places; returns which row now stands where."""
        order = list(range(len(self.lengths)))
        for b in sorted(rows, reverse=True):
            who, last = order.pop(), len(order)
            if b == last:
                continue
            order[b] = who
            for layer in self.layers:
                end = layer.slots.lengths[last]
                for states in (layer.keys, layer.values):
                    states[b, :, :end] = states[last, :, :end]
            self.visible[b], self.offset[b] = self.visible[last], self.offset[last]
            for group in self.groups:
                group.lengths[b] = group.lengths[last]
        self.show(self.visible[: len(order)], self.offset[: len(order)])
        for group in self.groups:
            group.set_lengths(group.lengths[: len(order)])
        return order

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
                torch.stack([pad(t, (0, 0, 0, end - t.shape[1])) for t in states]) for states in (keys, values)
            )
        self.show(*sees_all(len(rows), self.device))
        self.set_lengths(lengths)

    def restore(self, stock: DynamicCache, length: int) -> None:
        """Write the first `length` slots of every row back into the stock cache, laid out as plain decoding does."""
        for layer, own in zip(holding(stock), self.layers, strict=True):
            start = max(0, length - own.sliding_window + 1) if own.sliding_window else 0
            layer.keys = own.keys[:, :, start:length].clone()
            layer.values = own.values[:, :, start:length].clone()
            own.keys, own.values = nothing(own.keys), nothing(own.values)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length


def sees_all(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`visible` and `offset` of rows without padding."""
    return torch.ones(rows, 0, dtype=torch.bool, device=device), torch.zeros(rows, 1, dtype=torch.long, device=device)


def nothing(states: Tensor) -> Tensor:
    """No slots; not a view, which would keep the others alive."""
    return states.new_empty(*states.shape[:2], 0, states.shape[3])


def _buffer(states: Tensor, columns: int) -> Tensor:
    """A buffer with room for a block more, the states at the end of its first `columns` slots (a sliding layer holds
    only the last ones; the slots before are never visible)."""
    batch, heads, length, size = states.shape
    buffer = states.new_zeros(batch, heads, columns + BLOCK, size)
    buffer[:, :, columns - length : columns] = states
    return buffer
