"""`CapturedJoiningRunner`: rows that come and go, over static buffers."""

from typing import TYPE_CHECKING

from transformers.cache_utils import Cache

from .buffers import power_of_two, slots_for
from .cache import RaggedCache
from .capturable import is_captured, why_not_captured
from .captured import Captured
from .captured_cache import CapturedCache
from .joining import SPARE, JoiningRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPACIOUS = 4
"""times the rows or slots that are needed: to move is to copy all keys and values, and perhaps to record anew"""


class CapturedJoiningRunner(Captured, JoiningRunner):
    """A `JoiningRunner` whose rectangle of rows and slots has powers of two for its sides. When nobody is there it
    finds out anew whether the model can still be captured."""

    def _begin(self, read: Cache) -> RaggedCache:
        if why_not_captured(self.model):
            return super()._begin(read)
        return CapturedCache(read, [self.model], 1, self._columns(read.get_seq_length()))

    def slots_for(self, rows: list[int]) -> int:
        return power_of_two(len(rows)) * slots_for(max(rows, default=0) + SPARE)

    def _columns(self, held: int) -> int:
        return max(*self.wanted, held) + SPARE

    def _fit(self) -> None:
        """Buffers in which all rows find room, less than four times as large as they need be, and within the bound."""
        if not self.is_captured:
            super()._fit()
            return
        rows, columns = power_of_two(len(self.wanted)), self._columns(max(self.cache.lengths))
        buffers, slots = self.cache.buffers, slots_for(columns)
        fits = rows <= buffers.rows < SPACIOUS * rows and slots <= buffers.slots < SPACIOUS * slots
        held = buffers.rows * buffers.slots
        too_many = self.most_slots is not None and held > self.most_slots
        if not fits or (too_many and rows * slots < held):
            self.cache.move(rows, columns)


def joining_runner(
    model: "PreTrainedModel", most_rows: int, most_slots: int, forwards: str, recordable: bool = True
) -> JoiningRunner:
    """Captured where that is wanted and can be.

    Args:
        forwards: as `Rules.forwards`.
        recordable: whether what a drafter puts around it, if anything, can be recorded.
    """
    captured = recordable and is_captured(model, forwards)
    kind = CapturedJoiningRunner if captured else JoiningRunner
    return kind(model, most_rows, most_slots)
