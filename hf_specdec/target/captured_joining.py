"""`CapturedJoiningRunner`: rows that come and go, over static buffers."""

from typing import TYPE_CHECKING

from transformers.cache_utils import Cache

from .buffers import FixedCache, power_of_two, slots_for
from .captured import Captured, wants_captures, why_not_captured
from .joining import SPARE, JoiningRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CapturedJoiningRunner(Captured, JoiningRunner):
    """A `JoiningRunner` whose rectangle of rows and slots has powers of two for its sides."""

    def slots_for(self, rows: list[int]) -> int:
        """Slots that rows would take together that want so many each."""
        return power_of_two(len(rows)) * slots_for(max(rows, default=0) + SPARE)

    def _begin(self, read: Cache) -> FixedCache:
        return FixedCache(read, self._borrow(read, 1, self._columns(read.get_seq_length())))

    def _columns(self, held: int) -> int:
        return max(*self.wanted, held) + SPARE

    def _fit(self) -> None:
        """Buffers in which all rows find room, not twice as large as they need be."""
        rows, columns = power_of_two(len(self.wanted)), self._columns(max(self.cache.lengths))
        if self.cache.buffers.rows != rows or self.cache.buffers.slots != slots_for(columns):
            self._move(rows, columns)
        buffers = self.cache.buffers
        self.reserved = buffers.rows * buffers.slots
        self.bytes = sum(states.nbytes for states in (*buffers.keys, *buffers.values))

    def _move(self, rows: int, columns: int) -> None:
        """The rows go to buffers of another shape. Nothing is padded, and slots are positions."""
        leave = self._lease
        self.cache.move(self._borrow(self.cache, rows, columns))
        self._show(self.cache.buffers, self.visible[:0], self.offset[:0])
        leave()

    def _rows_are(self, rows: int) -> None:
        super()._rows_are(rows)
        self._show(self.cache.buffers, self.visible, self.offset)

    def _let_go(self) -> None:
        self._lease()
        super()._let_go()


def joining_runner(
    model: "PreTrainedModel", most_rows: int, most_slots: int, forwards: str, own_runner: bool = False
) -> JoiningRunner:
    """Captured where that is wanted and can be.

    Args:
        forwards: as `Rules.forwards`.
        own_runner: whether a drafter puts one around it, which a recording would not know.
    """
    captured = wants_captures(forwards, model) and not own_runner and not why_not_captured(model)
    kind = CapturedJoiningRunner if captured else JoiningRunner
    return kind(model, most_rows, most_slots)
