"""`Buffers`: static tensors that a model's captured forwards read and write, and `CapturedCache`, the rows in them.

Keys and values of R rows have C slots each, with R and C powers of two. What is not used yet is masked.
"""

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..clock import Moment, mark
from ..transfer import to_device
from .cache import RaggedCache, RaggedLayer, Slots, filled_up, holding, nothing, stay, window_of
from .recorded import RecordedSteps, is_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""tokens per row of a captured forward; wider ones are not captured"""
WIDEST = WIDTHS[-1]
MOST_FIRST = 2
"""tokens that a chain of steps begins with"""
FEWEST = 256
"""slots"""
MOST_KEPT = 4
"""sets of buffers per model that are kept for later calls"""
NO_MEMORY = "there is no memory for static buffers, so forwards are not captured. The text is not affected"


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, least - 1).bit_length()


def slots_for(columns: int) -> int:
    """C for so many columns of text, and drafts behind them."""
    return power_of_two(max(FEWEST, columns + 2 * WIDEST))


class Buffers:
    """Everything that a captured forward reads, at addresses that never change."""

    def __init__(self, like: Cache, rows: int, slots: int, device: torch.device) -> None:
        """
        Args:
            like: a cache of the same model, of whose layers shapes and dtypes are taken.
            rows: R.
            slots: C.
        """
        self.rows, self.slots, self.device = rows, slots, device
        with torch.inference_mode(False):  # else no other call could write into them
            self._make(like)

    def _make(self, like: Cache) -> None:
        rows, slots, device = self.rows, self.slots, self.device
        self.keys, self.values = (
            [states.new_zeros(rows, states.shape[1], slots, states.shape[3]) for states in several]
            for several in ([layer.keys for layer in holding(like)], [layer.values for layer in holding(like)])
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(rows, WIDEST)
        self.ends = zeros(rows)
        """slots of each row that count"""
        self.offset = zeros(rows, 1)
        """what is added to a slot to get its position"""
        self.visible = torch.ones(rows, slots, dtype=torch.bool, device=device)
        """false for the padding of a prompt"""
        self.seen = zeros(rows, WIDEST, WIDEST, dtype=torch.bool)
        self.depth = zeros(rows, WIDEST)
        """of a tree: which tokens each one sees, and how deep it lies"""
        self.paths = zeros(rows, WIDEST)
        """of a tree: which of its slots are kept, one after the other"""
        self.row_index = torch.arange(rows, device=device)[:, None]
        self.chain = torch.arange(WIDEST, device=device)[None]
        """depths of a chain"""
        self.held: dict[str, Tensor] = {}
        """what was made by `static`"""
        self.first = zeros(rows, MOST_FIRST)
        """what a chain of steps begins with"""
        self.numbers = zeros(rows, WIDEST, dtype=torch.float64)
        """random ones, for the draws of a chain"""
        self.recorded = RecordedSteps(device)
        self.busy = False
        self.freed: Moment | None = None
        """when they were given back last"""
        self.alike: tuple[int, ...] | None = None
        """widths that round alike, once that was found out"""

    def static(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """One more tensor [R, ...] that stays, of zeros when it is first asked for."""
        if name not in self.held:
            with torch.inference_mode(False):
                self.held[name] = torch.zeros(self.rows, *shape, dtype=dtype, device=self.device)
        return self.held[name]

    def shared(self, logits: Tensor) -> Tensor:
        """A forward's logits [R, W, V] where all have theirs, whichever it was: recordings would hold some each."""
        width = logits.shape[1]
        if width > WIDEST:
            return logits
        shared = self.static("logits", WIDEST, logits.shape[2], dtype=logits.dtype)[:, :width]
        shared.copy_(logits)
        return shared

    def give_back(self) -> None:
        """Others may have them, once the device has done what it was asked for until now."""
        self.freed = mark(self.device)
        self.busy = False

    def clear(self) -> None:
        """No text: values that are NaN would spoil sums even where they are masked."""
        for states in (*self.keys, *self.values, self.ends):
            states.zero_()


class Shelf:
    """Buffers of a model that wait for the next call."""

    def __init__(self) -> None:
        self.state: Hashable = 0
        self.kept: list[Buffers] = []
        """the last ones used first"""
        self.lock = threading.Lock()

    def borrow(self, like: Cache, rows: int, slots: int, device: torch.device, state: Hashable) -> Buffers:
        """Cleared buffers of this shape that nobody uses; they are made where there are none.

        Args:
            state: the model's `fingerprint`; what was captured of another state is of no use.
        """
        with self.lock:
            if state != self.state:
                self.state, self.kept = state, []
            found = next((b for b in self.kept if not b.busy and (b.rows, b.slots) == (rows, slots)), None)
            if found is None:
                found = self._made(like, rows, slots, device)
            else:
                if found.freed is not None and found.freed.event is not None:
                    found.freed.event.wait(torch.cuda.current_stream(device))
                found.clear()
                self.kept.remove(found)
            found.busy = True
            self.kept = [found, *self.kept][:MOST_KEPT]
            return found

    def let_go(self) -> None:
        """Of those that nobody uses."""
        self.kept = [kept for kept in self.kept if kept.busy]

    def _made(self, like: Cache, rows: int, slots: int, device: torch.device) -> Buffers:
        """New ones. Where memory is short those that nobody uses go first.

        Raises:
            torch.OutOfMemoryError: that is not enough.
        """
        try:
            return Buffers(like, rows, slots, device)
        except torch.OutOfMemoryError:
            self.let_go()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return Buffers(like, rows, slots, device)


_shelves: "weakref.WeakKeyDictionary[PreTrainedModel, Shelf]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def shelf_of(model: "PreTrainedModel") -> Shelf:
    """Where a model's buffers wait."""
    with _lock:
        return _shelves.setdefault(model, Shelf())


class CapturedSlots(Slots):
    """Where the rows stand, in a tensor that stays. The host counts; the device is told before a forward that needs
    to know, in one transfer."""

    def __init__(self, lengths: list[int], buffers: Buffers) -> None:
        self.buffers, self.end = buffers, buffers.slots
        self._told: list[int] | None = None
        """what the device was told last; None where it knows better"""
        super().__init__(lengths, buffers.device)
        self.row_index = buffers.row_index

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)

    def advance(self, width: int) -> None:
        self.lengths = [length + width for length in self.lengths]

    @property
    def ends(self) -> Tensor:  # type: ignore[override]
        """[R]; 0 in rows that nobody has."""
        return self.buffers.ends

    def tell(self) -> None:
        """Bring the device up to date."""
        if self._told != self.lengths:
            self._told = list(self.lengths)
            missing = self.buffers.rows - len(self.lengths)
            self.buffers.ends.copy_(to_device([*self.lengths, *[0] * missing], self.device), non_blocking=True)

    def take(self, lengths: Tensor) -> None:
        """The device [B] knows where the rows stand, and the host does not yet."""
        self._told = None
        self.buffers.ends[: len(lengths)] = lengths

    def reserve(self, width: int) -> None:
        self.places = self.after(width)


class CapturedCache(RaggedCache):
    """A batch in static buffers; its first rows are in use."""

    def __init__(self, stock: Cache, buffers: Buffers) -> None:
        """
        Args:
            stock: holds the prompt. It is emptied.
        """
        columns = stock.get_seq_length()
        slots = CapturedSlots([columns] * stock.layers[0].keys.shape[0], buffers)
        layers = []
        for layer, keys, values in zip(holding(stock), buffers.keys, buffers.values, strict=True):
            layers.append(CapturedLayer(slots, keys, values, window_of(layer)))
            held, rows = slice(columns - layer.keys.shape[2], columns), layer.keys.shape[0]
            keys[:rows, :, held], values[:rows, :, held] = layer.keys, layer.values
            layer.keys, layer.values = nothing(layer.keys), nothing(layer.values)
        Cache.__init__(self, layers=layers)
        self.device, self.groups, self.buffers = buffers.device, [slots], buffers

    @classmethod
    def of(cls, cache: RaggedCache, buffers: Buffers) -> "CapturedCache":
        """Go on in buffers where the rows were in a cache that grows."""
        fixed = cls.__new__(cls)
        layers = [CapturedLayer(layer.slots, layer.keys, layer.values, layer.sliding_window) for layer in cache.layers]
        Cache.__init__(fixed, layers=layers)
        fixed.device, fixed.groups = cache.device, cache.groups
        fixed.move(buffers)
        return fixed

    def tell(self) -> None:
        """Bring the device up to date. All layers stand at the same places."""
        assert isinstance(self.slots, CapturedSlots)
        self.slots.tell()

    def take(self, lengths: Tensor) -> None:
        """As `CapturedSlots.take`."""
        assert isinstance(self.slots, CapturedSlots)
        self.slots.take(lengths)

    @property
    def rows(self) -> int:
        return self.buffers.rows

    def move(self, buffers: Buffers) -> None:
        """Go on in other buffers."""
        rows, end = len(self.lengths), max(self.lengths)
        for layer, keys, values in zip(self.layers, buffers.keys, buffers.values, strict=True):
            keys[:rows, :, :end], values[:rows, :, :end] = layer.keys[:rows, :, :end], layer.values[:rows, :, :end]
            layer.keys, layer.values = keys, values
        slots = CapturedSlots(self.lengths, buffers)
        for layer in self.layers:
            layer.slots = slots
        self.groups, self.buffers = [slots], buffers

    def keep(self, paths: Sequence[Sequence[int]], group: Slots | None = None) -> None:
        """All layers in one step, recorded as forwards are: each of them would launch some ten kernels."""
        for width in WIDTHS if is_at_once() else ():
            if max(self.lengths) + width <= self.buffers.slots:
                self._record_move(width)
        if stay(paths):
            return
        self.tell()
        buffers, longest = self.buffers, max(map(len, paths))
        paths = [*paths, *[[]] * (buffers.rows - len(paths))]
        width = power_of_two(longest)
        width = longest if max(self.lengths) + width > buffers.slots else width  # there is not always room
        if width > WIDEST:
            super().keep(paths, group)
            return

        self._record_move(width)
        buffers.paths[:, :width] = to_device(filled_up(paths, width), self.device)
        buffers.recorded.run(("keep", width), lambda: self._move(width))

    def _move(self, width: int) -> None:
        """In all layers, so many slots of each row to where they are kept."""
        buffers = self.buffers
        to, of = (buffers.ends[:, None] + after[:, :width] for after in (buffers.chain, buffers.paths))
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[buffers.row_index, :, to] = states[buffers.row_index, :, of]

    def _record_move(self, width: int) -> None:
        """If its time has come: where nothing moves, as done twice a move is another one."""
        key, buffers = ("keep", width), self.buffers
        if buffers.recorded.will_record(key):
            self.tell()
            buffers.paths[:, :width] = buffers.chain[:, :width]
            buffers.recorded.run(key, lambda: self._move(width))

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, which move to the front. One may come twice; the buffers have room for all."""
        if rows and rows != list(range(len(rows))):
            index = to_device(rows, self.device)
            for layer in self.layers:
                for states in (layer.keys, layer.values):
                    states[: len(rows)] = states[index]
        self.set_lengths([self.lengths[row] for row in rows])


class CapturedLayer(RaggedLayer):
    """A layer's part of the buffers. All of it is looked at: what does not count is masked."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        assert self.slots.places is not None, "static buffers are written place by place"
        self.write(self.slots.places, self.keys, key_states)
        self.write(self.slots.places, self.values, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """The same at all times: what a model computes from it would be captured with it."""
        return int(self.keys.shape[2])
