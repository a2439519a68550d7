"""`JoiningRunner`: a ragged runner whose rows come and go. A row's prompt is read by itself before it joins."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..protocol import Feature
from .cache import BLOCK, RaggedCache
from .devices import input_device
from .inputs import CACHE, is_idle
from .lockstep import prefill
from .ragged import RaggedRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPARE = BLOCK
"""slots of each row for what is drafted behind its text"""


class JoiningRunner(RaggedRunner):
    """Rows of any lengths, nothing padded: a token's slot is its position.

    Buffers are rectangles of rows and slots. A row that leaves makes room, which the last row takes; a row that joins
    is written behind the others. Buffers are made anew where one row does not fit, and where half of them is not
    wanted any more.
    """

    def __init__(self, model: "PreTrainedModel", most_rows: int = 1, most_slots: int | None = None) -> None:
        """
        Args:
            most_rows: that are expected at once.
            most_slots: of all rows together; None for any number.
        """
        nobody = torch.empty(0, 0, dtype=torch.long, device=input_device(model))
        super().__init__(model, {CACHE: DynamicCache(config=model.config)}, nobody)
        self.most_rows, self.most_slots = most_rows, most_slots
        self.wanted: list[int] = []
        """[B] slots that each row is known to come to need"""
        self.reserved = self.bytes = 0
        """slots of each layer's buffers, empty ones among them, and what all of them take"""
        self.columns = 0

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths if self.wanted else []

    def slots_for(self, rows: list[int]) -> int:
        """Slots that rows would take together that want so many each."""
        return len(rows) * -(-(max(rows, default=0) + SPARE) // BLOCK) * BLOCK

    def join(self, read: Cache, wanted: int) -> None:
        """One more row.

        Args:
            read: a cache of one row, which holds the prompt. It is used up.
            wanted: slots that the row may come to need.
        """
        self.wanted.append(wanted)
        if len(self.wanted) == 1:
            self.cache = self._begin(read)
            self._settle()
        else:
            self._settle()
            self.cache.join(read)

    def _begin(self, read: Cache) -> RaggedCache:
        """The first row."""
        return RaggedCache(read)

    def leave(self, rows: list[int]) -> list[int]:
        """These rows go; returns which of the rows before now stands where."""
        order = self.cache.leave(rows)
        self._go_on(order)
        return order

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        if rows:
            self.cache.select(rows)
        self._go_on(rows)

    def _go_on(self, rows: list[int]) -> None:
        self.wanted = [self.wanted[b] for b in rows]
        if self.wanted:
            self._settle()
        else:
            del self.cache
            self.reserved = self.bytes = 0

    def _settle(self) -> None:
        """In buffers that fit those who are there."""
        self._fit()
        self.rows = list(range(len(self.wanted)))
        rows, _, slots, _ = self.cache.layers[0].keys.shape
        self.reserved = rows * slots
        self.bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def _fit(self) -> None:
        """Buffers in which all rows find room, not twice as long as they need be."""
        rows, slots = len(self.wanted), self.slots_for([max(*self.wanted, *self.cache.lengths)])
        held = self.cache.layers[0].keys.shape
        if held[0] < rows or not slots <= held[2] <= 2 * slots:
            most = self.most_rows if self.most_slots is None else min(self.most_rows, self.most_slots // slots)
            self.cache.lay_out(max(rows, most), slots)


class Reading:
    """A prompt that is read piece by piece, in forwards of its own."""

    def __init__(self, model: "PreTrainedModel", ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        """
        Args:
            ids: [1, P].
            model_kwargs: `generate`'s own, with an empty cache.
        """
        self.model, self.ids, self.done = model, ids, 0
        self.kwargs = {
            name: value
            for name, value in model_kwargs.items()
            if name != "position_ids" and not is_idle(model, name, value)
        }
        self.cache: DynamicCache = model_kwargs[CACHE]
        self.features: Sequence[Feature] = ()
        """to keep of it, as of `Runner`"""
        self._states: dict[Feature, list[Tensor]] = {}
        """[1, any, H] of each piece"""

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return self.ids.shape[1] - self.done

    def read(self, tokens: int) -> Tensor:
        """Read at most so many more; logits [1, 1, V] after the last of them."""
        before, self.done = self.done, min(self.done + tokens, self.ids.shape[1])
        ids = self.ids[:, : self.done]
        seen = {"attention_mask": torch.ones_like(ids)}
        answer = prefill(self.model, ids, self.kwargs | seen, self.done - before, self.features)
        for name, states in answer.features.items():
            self._states.setdefault(name, []).append(states)
        return answer.logits

    def states(self) -> dict[Feature, Tensor]:
        """[1, P, ...] of what was read, by the names that were asked for."""
        return {name: torch.cat(pieces, dim=1) for name, pieces in self._states.items()}


def read_at_once(model: "PreTrainedModel", ids: Tensor) -> DynamicCache:
    """A cache of one row that holds ids [1, P]."""
    kwargs = {CACHE: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    reading = Reading(model, ids, kwargs)
    reading.read(reading.left)
    return reading.cache
