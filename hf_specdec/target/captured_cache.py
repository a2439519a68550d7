"""`CapturedCache`: a ragged cache in `Buffers`, which moves to others where it outgrows them."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor
from transformers.cache_utils import Cache

from ..transfer import fill, to_device
from .buffers import WIDEST, WIDTHS, Buffers, power_of_two, seen_of, slots_for
from .cache import RaggedCache, RaggedLayer, Slots, filled_up, holding, nothing, sees_all, stay
from .fingerprint import fingerprint
from .recorded import is_at_once
from .shelf import shelf_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


class CapturedSlots(Slots):
    """Where the rows stand, in a tensor that stays. The host counts; the device is told before a forward that needs
    to know, in one transfer."""

    def __init__(self, lengths: list[int], buffers: Buffers) -> None:
        self.buffers, self.end = buffers, buffers.slots  # of which a forward looks at those before `end`
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

    def to_tell(self) -> list[int]:
        """[R] what the device is about to be told."""
        self._told = list(self.lengths)
        return [*self.lengths, *[0] * (self.buffers.rows - len(self.lengths))]

    def tell(self) -> None:
        """Bring the device up to date."""
        if self._told != self.lengths:
            fill(self.buffers.ends, self.to_tell())

    def take(self, lengths: Tensor) -> None:
        """The device [B] knows where the rows stand, and the host does not yet."""
        self._told = None
        self.buffers.ends[: len(lengths)] = lengths

    def reserve(self, width: int) -> None:
        self.places = self.after(width)


class CapturedLayer(RaggedLayer):
    """A layer's part of the buffers. What is looked at and does not count is masked."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        assert self.slots.places is not None, "buffers are written place by place"
        self.write(self.slots.places, self.keys, key_states)
        self.write(self.slots.places, self.values, value_states)
        return self.keys[:, :, : self.slots.end], self.values[:, :, : self.slots.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """The same at all times: what a model computes from it would be captured with it."""
        return int(self.keys.shape[2])


class CapturedCache(RaggedCache):
    """A batch whose rows are the first of the buffers'. They are given back once the cache is gone."""

    buffers: Buffers
    whole = False
    """whether a forward looks at all slots, however few of them the text has come to"""

    def __init__(self, held: Cache, models: "Sequence[PreTrainedModel]", rows: int, columns: int) -> None:
        """
        Args:
            held: a stock cache that holds the prompt, or a ragged one. It is emptied.
            models: that compute what is recorded. The buffers are the first one's, which the cache is of.
            rows, columns: for which there is to be room.

        Raises:
            torch.OutOfMemoryError: there is none; `held` is what it was.
        """
        layers = holding(held)
        first = layers[0].keys
        if isinstance(held, RaggedCache):
            slots, self.visible, self.offset = held.slots, held.visible, held.offset
        else:
            slots = Slots([held.get_seq_length()] * len(first), first.device)
            self.visible, self.offset = sees_all(len(first), first.device)
        Cache.__init__(self, layers=[CapturedLayer(slots, one.keys, one.values, one) for one in layers])
        self.device, self.groups, self.models = slots.device, [slots], models
        self._leave: Callable[[], object] = lambda: None
        self.move(rows, columns)
        for one in layers:
            one.keys, one.values = nothing(one.keys), nothing(one.values)

    def move(self, rows: int, columns: int) -> None:
        """Go on in buffers that have room for so many rows and columns."""
        state = tuple(map(fingerprint, self.models))
        buffers = shelf_of(self.models[0]).borrow(self, rows, slots_for(columns), self.device, state)
        alive, end = len(self.lengths), max(self.lengths)
        slots = CapturedSlots(self.lengths, buffers)
        for layer, keys, values in zip(self.layers, buffers.keys, buffers.values, strict=True):
            for there, states in ((keys, layer.keys), (values, layer.values)):
                states = states[:alive, :, :end]
                there[:alive, :, end - states.shape[2] : end] = states  # of a stock sliding layer the last ones
            layer.slots, layer.keys, layer.values = slots, keys, values
        self.groups, self.buffers = [slots], buffers
        self.show(self.visible[:alive, : buffers.slots], self.offset[:alive])
        leave, self._leave = self._leave, weakref.finalize(self, buffers.give_back)
        leave()

    def with_room(self, width: int) -> Buffers:
        """The buffers, with so many slots behind each row, which the next step looks at."""
        if (columns := max(self.lengths) + width) > self.buffers.slots:
            self.move(self.buffers.rows, columns)
        self.slots.end = self.buffers.slots if self.whole else min(seen_of(columns), self.buffers.slots)
        return self.buffers

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        """A step behind `with_room`, recorded or not. Where all are recorded at once, it is for texts of all lengths;
        what it gives for another one's is overwritten."""
        recorded, end, other = self.buffers.recorded, self.slots.end, seen_of(1)
        while is_at_once() and not self.whole and other <= self.buffers.slots:
            if recorded.will_record((key, other)):
                self.slots.end = other
                recorded.run((key, other), step)
            other *= 2
        self.slots.end = end
        return recorded.run((key, end), step)

    def will_record(self, key: Hashable) -> bool:
        """Whether `run` is about to record this step."""
        return self.buffers.recorded.will_record((key, self.slots.end))

    def show(self, visible: Tensor, offset: Tensor) -> None:
        visible, offset, (rows, columns) = visible.clone(), offset.clone(), visible.shape  # they may be the buffers'
        buffers = self.buffers
        buffers.visible.fill_(True)
        buffers.visible[:rows, :columns] = visible
        buffers.offset.zero_()
        buffers.offset[:rows] = offset
        self.visible, self.offset = buffers.visible, buffers.offset

    @property
    def rows(self) -> int:
        return self.buffers.rows

    def tell(self) -> None:
        """Bring the device up to date. All layers stand at the same places."""
        assert isinstance(self.slots, CapturedSlots)
        self.slots.tell()

    def to_tell(self) -> list[int]:
        """As `CapturedSlots.to_tell`."""
        assert isinstance(self.slots, CapturedSlots)
        return self.slots.to_tell()

    def take(self, lengths: Tensor) -> None:
        """As `CapturedSlots.take`."""
        assert isinstance(self.slots, CapturedSlots)
        self.slots.take(lengths)

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
        self._move(to_device(filled_up(paths, width), self.device), width)

    def _move(self, paths: Tensor, width: int) -> None:
        """In all layers, these slots of each row [R, width] to where they are kept."""
        buffers, paths = self.buffers, self.buffers.put("paths", paths, width)

        def step() -> None:
            buffers.move(*(buffers.ends[:, None] + after for after in (buffers.chain[:, :width], paths)))

        buffers.recorded.run(("keep", width), step)

    def _record_move(self, width: int) -> None:
        """If its time has come: where nothing moves, as done twice a move is another one."""
        if self.buffers.recorded.will_record(("keep", width)):
            self.tell()
            self._move(self.buffers.chain[:, :width].expand(self.rows, -1), width)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, which move to the front. One may come twice; the buffers have room for all."""
        visible, offset = self.visible[: len(rows)], self.offset[: len(rows)]
        if rows != list(range(len(rows))):
            index = to_device(rows, self.device)
            for layer in self.layers:
                for states in (layer.keys, layer.values):
                    states[: len(rows)] = states[index]
            visible, offset = self.visible[index], self.offset[index]
        self.show(visible, offset)
        self.set_lengths([self.lengths[row] for row in rows])
