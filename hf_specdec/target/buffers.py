"""`Buffers`: tensors that a model's recorded steps read and write, at addresses that never change.

Keys and values of R rows have C slots each, with R and C powers of two. What is not used yet is masked.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..clock import Moment, mark
from .cache import holding
from .recorded import RecordedSteps

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""tokens per row of a captured forward; wider ones are not recorded"""
WIDEST = WIDTHS[-1]
FEWEST = 256
"""slots"""
NO_MEMORY = "there is no memory for static buffers, so forwards are not captured. The text is not affected"


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, least - 1).bit_length()


def seen_of(columns: int) -> int:
    """How many of the slots a forward looks at that needs so many: few numbers, as each has recordings of its own."""
    return power_of_two(max(FEWEST, columns))


def slots_for(columns: int) -> int:
    """C for so many columns of text, and drafts behind them."""
    return seen_of(columns + 2 * WIDEST)


class Buffers:
    """Keys and values, what says which of them count, and the steps that were recorded over them."""

    def __init__(self, like: Cache, rows: int, slots: int, device: torch.device) -> None:
        """
        Args:
            like: a cache of the same model, of whose layers shapes and dtypes are taken.
            rows: R.
            slots: C.
        """
        self.rows, self.slots, self.device = rows, slots, device
        with torch.inference_mode(False):  # else no other call could write into them
            self.states, self.keys, self.values = _states([*holding(like)], rows, slots)
            self.ends = torch.zeros(rows, dtype=torch.long, device=device)
            """slots of each row that count"""
            self.offset = torch.zeros(rows, 1, dtype=torch.long, device=device)
            """what is added to a slot to get its position"""
            self.visible = torch.ones(rows, slots, dtype=torch.bool, device=device)
            """false for the padding of a prompt"""
            self.row_index = torch.arange(rows, device=device)[:, None]
            self.chain = torch.arange(WIDEST, device=device)[None]
            """depths of a chain"""
        self.recorded = RecordedSteps(device)
        self.free: Moment | None = None
        """since when nobody uses them; None while somebody does"""
        self.turn = 0
        """when they were borrowed last, of all borrowings"""
        self._inputs: dict[Hashable, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of all tensors, and of what was recorded over them."""
        own = self.ends, self.offset, self.visible, self.row_index, self.chain
        inputs = list(self._inputs.values())  # others may be adding some
        return sum(tensor.nbytes for tensor in (*self.states, *own, *inputs)) + self.recorded.num_bytes

    def input(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor [R, ...] that steps read, of zeros when it is first asked for."""
        if (key := (name, shape, dtype)) not in self._inputs:
            with torch.inference_mode(False):
                self._inputs[key] = torch.zeros(self.rows, *shape, dtype=dtype, device=self.device)
        return self._inputs[key]

    def put(self, name: str, values: Tensor, width: int) -> Tensor:
        """Values [B, W, ...] where steps of a width read them, [R, width, ...]; what is beyond stays what it was. Those
        of steps that are too wide to be recorded lie anywhere."""
        if width > WIDEST:
            there = values.new_zeros(self.rows, width, *values.shape[2:])
        else:
            there = self.input(name, WIDEST, *values.shape[2:], dtype=values.dtype)[:, :width]
        there[: values.shape[0], : values.shape[1]] = values
        return there

    def shared(self, logits: Tensor) -> Tensor:
        """A forward's logits [R, W, V] where all have theirs, whichever it was: recordings would hold some each."""
        width = logits.shape[1]
        return logits if width > WIDEST else self.put("logits", logits, width)

    def take(self) -> None:
        """Use them, which nobody does, without a text: values that are NaN would spoil sums even where they are
        masked."""
        if self.free is not None and self.free.event is not None:
            self.free.event.wait(torch.cuda.current_stream(self.device))
        self.free = None
        for states in (*self.states, self.ends):
            states.zero_()

    def move(self, to: Tensor, of: Tensor) -> None:
        """In all layers, what stands in these slots of each row [R, W] to others."""
        for states in self.states:
            states[:, self.row_index, :, to] = states[:, self.row_index, :, of]

    def give_back(self) -> None:
        """Others may have them, once the device has done what it was asked for until now."""
        self.free = mark(self.device)


def _states(layers: list[Any], rows: int, slots: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tensors [L, R, heads, C, head size] of zeros for the keys and values of all layers, one for each kind that they
    have: to move slots is to copy each once. Then the keys and the values of every layer, which are parts of those."""
    every = [states for layer in layers for states in (layer.keys, layer.values)]
    kinds = [(states.shape[1], states.shape[3], states.dtype, states.device) for states in every]
    whole = {
        kind: torch.zeros(kinds.count(kind), rows, kind[0], slots, kind[1], dtype=kind[2], device=kind[3])
        for kind in dict.fromkeys(kinds)
    }
    parts = {kind: iter(states) for kind, states in whole.items()}
    each = [next(parts[kind]) for kind in kinds]
    return list(whole.values()), each[::2], each[1::2]
