"""`RaggedRunner`: each row has its own length. It runs over a `RaggedCache` with 4-D masks and takes trees.

The slots of a row are the columns of plain decoding's `input_ids` (plus what a cache passed by the user held before).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..protocol import Feature, Forward
from .cache import RaggedCache, Slots
from .compiled import uncompiled
from .devices import input_device
from .features import asking
from .grouped import attending
from .inputs import CACHE, position_limit
from .lockstep import answered, prefill
from .masks import allowed_slots, as_bias, attention_windows, tree_shape
from .near import near_slots, with_near

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = 8
"""trees whose shapes are kept"""

T = TypeVar("T")
Reader = Callable[[Tensor, Tensor | None, Tensor], T]
"""what is done with tokens [B, T] that see what `RaggedRunner.shape` says"""


class RetiredRow(NamedTuple):
    """A row that has stopped: what its part of the cache held."""

    length: int
    states: list[tuple[Tensor, Tensor]]
    visible: Tensor
    offset: Tensor


class RaggedRunner:
    """Rows of any lengths. The prompt is read into the call's stock cache, which `RaggedCache` then takes over."""

    cache: RaggedCache
    padded = False
    """whether there are columns that a row must not see, or may be"""
    widths: Sequence[int] = ()
    sums_by_distance = False
    """whether attention sums in one order wherever in a chain or a tree a token stands (`near`)"""

    def __init__(
        self, model: "PreTrainedModel", model_kwargs: dict[str, Any], ids: Tensor, new_columns: int | None = None
    ) -> None:
        """
        Args:
            model_kwargs: `generate`'s own, the cache (one that `is_adoptable`) among them.
            ids: [B, P] the prompt; fewer columns than the cache will hold where that is continued.
            new_columns: how many of the last columns the cache does not hold yet; None for all.
        """
        self.model, self.model_kwargs, self.prompt, self.new_columns = model, model_kwargs, ids, new_columns
        self.stock = model_kwargs[CACHE]
        self.windows, self.bare = attention_windows(model), uncompiled(model)
        self.limit = position_limit(model)
        self.features: Sequence[Feature] = ()
        self.rows = list(range(ids.shape[0]))
        self.retired: dict[int, RetiredRow] = {}
        self._tree_shape = lru_cache(SHAPES)(tree_shape)  # a tree that comes again is not built anew

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it."""
        answer = prefill(self.model, self.prompt, self.model_kwargs, self.new_columns, self.features)
        self.adopt()
        return answer

    def adopt(self, columns: int | None = None) -> None:
        """Take over the stock cache.

        Args:
            columns: of the prompt, if that is still to be read; None where the cache holds it.
        """
        self.columns = self.stock.get_seq_length() if columns is None else columns
        self.cache = self._taken_over()
        rows, device = len(self.rows), self.cache.device
        mask, positions = self.model_kwargs.get("attention_mask"), self.model_kwargs.get("position_ids")
        visible = (
            torch.ones(rows, self.columns, dtype=torch.bool, device=device) if mask is None else mask.bool().to(device)
        )
        # Not asked of an accelerator, which would have to be waited for.
        self.padded = mask is not None and (device.type != "cpu" or not bool(visible.all()))
        if positions is None:
            positions = (visible.long().cumsum(-1) - 1).clamp_min(0)
        self.prompt_positions = positions
        self.cache.show(visible, (positions[:, -1:] + 1 - self.columns).expand(rows, 1).to(device))

    def _taken_over(self) -> RaggedCache:
        """The batch, as the stock cache holds it, which is emptied."""
        return RaggedCache(self.stock)

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        """Append tokens [B, T] to each row, a chain or a tree, of which `counts` count in each row."""
        answer = self.answer(tokens, parents)
        if counts is None:
            for group in self.cache.groups:
                group.advance(tokens.shape[1])
        else:
            self.cache.set_lengths([length + n for length, n in zip(self.cache.lengths, counts, strict=True)])
        return answer

    def answer(self, tokens: Tensor, parents: Sequence[Sequence[int]] | None) -> Forward:
        """The forward's answer; no row is advanced."""
        return answered(self.over(tokens, parents, self.read), tokens.shape[1], self.features, self.cache.slots)

    is_captured = False
    """whether forwards are over static buffers"""

    def computing(self, width: int) -> Any:
        """What computes a forward of so many tokens per row: the model, or what stands for it. Not what is compiled:
        here hardly two forwards have one shape."""
        return self.bare

    def shared(self, logits: Tensor) -> Tensor:
        """Where static buffers have room for a step's logits, these there."""
        return logits

    def over(
        self,
        tokens: Tensor,
        parents: Sequence[Sequence[int]] | None,
        step: Reader[T],
        key: Hashable = None,
        slots_per_token: int = 1,
    ) -> T:
        """What a step gives for tokens [B, T], of which no row is advanced. For runners that change what is answered.

        Args:
            step: over static buffers it gives tensors [B, T, ...], for rows and tokens that are padded, and may be
                recorded: it asks the device nothing, and a replay runs nothing of it on the host.
            key: all that the step depends on beside the tokens; equal for steps that do the same.
            slots_per_token: of the cache that the step writes to.
        """
        return step(tokens, *self.shape(parents, tokens.shape[1]))

    def read(self, tokens: Tensor, seen: Tensor | None, depth: Tensor, **inputs: Any) -> Any:
        """The model's outputs over tokens [B, T] that see what `shape` says; no row is advanced.

        Args:
            inputs: of the model, in place of those made here or beside them.
        """
        self.cache.reserve(tokens.shape[1])
        extra, compute = asking(self.features), self.computing(tokens.shape[1])
        ends = [] if self.is_captured else [length + tokens.shape[1] for length in self.cache.lengths]
        slots = near_slots(self.cache.slots.ends, seen, depth) if self.sums_by_distance else None
        with attending(compute, ends, slots):
            return compute(
                input_ids=tokens,
                attention_mask=None if self._as_plainly(tokens.shape[1]) else self.masks(seen, depth, near=slots),
                use_cache=True,
                return_dict=True,
                **{"position_ids": self.positions(depth), CACHE: self.cache} | extra | inputs,
            )

    def _as_plainly(self, width: int) -> bool:
        """Whether the next forward needs no mask, as one of plain decoding: a token per row that sees all."""
        if width > 1 or self.padded or set(self.windows.values()) != {None}:
            return False
        return len(self.cache.groups) == 1 and len(set(self.cache.lengths)) == 1

    def shape(self, parents: Sequence[Sequence[int]] | None, width: int) -> tuple[Tensor | None, Tensor]:
        """Which new tokens each new token sees (None in a chain: itself and all before), and each one's depth."""
        if parents is None:
            return None, torch.arange(width, device=self.cache.device)[None]
        trees = tuple(map(tuple, parents))
        return self._tree_shape(trees[:1] if len(set(trees)) == 1 else trees, self.cache.device)

    def positions(self, depth: Tensor) -> Tensor:
        """[B, T]; columns that do not count in a short row stay below the limit of learned embeddings."""
        first = self.cache.offset + self.cache.slots.ends[:, None]
        return torch.minimum(first + depth, first.clamp_min(self.limit - 1))

    def masks(
        self, seen: Tensor | None, depth: Tensor, slots: Slots | None = None, near: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Additive 4-D masks [B, 1, T, visible] for a group of layers (default: the lowest) that has reserved room, or
        [B, 1, T, visible + NEAR] where the last keys are gathered from slots that `near_slots` gives."""
        slots = slots or self.cache.slots
        allowed, distance = allowed_slots(slots.ends, slots.end, seen, depth)
        visible, kind = self.cache.visible[:, : slots.end], self.cache.device.type
        allowed[:, :, : visible.shape[1]].logical_and_(visible[:, None])
        if near is not None:
            allowed, distance = with_near(allowed, distance, near, visible)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype
        return as_bias(allowed, distance, self.windows, dtype)

    def truncate(self, lengths: list[int]) -> None:
        """Roll every row back to its length."""
        self.cache.set_lengths(lengths)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Roll back to `lengths`, then keep the tokens of an accepted path (indices after that length)."""
        self.cache.set_lengths(lengths)
        self.cache.keep(paths)
        self.cache.set_lengths([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        self.cache.select(rows)
        self.rows = [self.rows[row] for row in rows]

    def retire(self, stay: list[int], keep: bool) -> None:
        """Go on with the rows `stay`; put the others' keys and values aside where they are still wanted."""
        for b in set(range(len(self.rows))) - set(stay) if keep else ():
            visible, offset = self.cache.visible[b, : self.columns].clone(), self.cache.offset[b].clone()
            self.retired[self.rows[b]] = RetiredRow(self.cache.lengths[b], self.cache.row(b), visible, offset)
        self.select(stay)

    def finish(self, ids: Tensor | None) -> None:
        """Write all rows into the stock cache as plain decoding leaves it.

        Plain decoding goes on feeding padding to rows that have stopped; one forward makes up for that.
        """
        self.retire([], keep=True)
        rows = [self.retired[row] for row in sorted(self.retired)]
        self.cache = RaggedCache.empty(self.stock, len(rows), self.cache.device)
        self.cache.assemble([row.states for row in rows], [row.length for row in rows])
        if ids is None:
            self.cache.restore(self.stock, self.columns)
            return
        self.cache.show(torch.stack([row.visible for row in rows]), torch.stack([row.offset for row in rows]))
        before = self.columns - self.prompt.shape[1]
        final = before + ids.shape[1] - 1
        missing = [final - row.length for row in rows]
        if any(missing):
            tokens = ids.new_zeros(len(rows), max(missing))
            for b, (row, n) in enumerate(zip(rows, missing, strict=True)):
                tokens[b, :n] = ids[b, row.length - before : final - before]
            self.forward(tokens.to(input_device(self.model)), counts=missing)
        self.cache.restore(self.stock, final)
