"""One forward of a decoder-only model over its cache, in two ways that look the same from outside.

- `LockstepRunner`: rows keep equal lengths. It runs over transformers' own cache, without masks where there is no
  padding, with the model's own 2-D mask otherwise, and rolls back with `crop`: any model that can do that will do.
- `RaggedRunner`: each row has its own length. It runs over a `RaggedCache` with 4-D masks and takes trees.

In both, `forward` appends tokens after each row's length and advances it; `truncate` sets the lengths back. The
slots of a row are the columns of plain decoding's `input_ids` (plus what a cache passed by the user held before).
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from .cache import RaggedCache

RAGGED_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}
"""Model inputs that the ragged runner makes itself or can leave out; any other asks for lockstep."""


def prefill(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any], new_columns: int | None) -> Any:
    """The first forward, as plain decoding does it; `model_kwargs` are `generate`'s own.

    Args:
        input_ids: [B, P].
        new_columns: how many of the last columns the cache does not hold yet; None for all.
    """
    inputs = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=new_columns, is_first_iteration=True, **model_kwargs
    )
    return model(**inputs, return_dict=True)


class LockstepRunner:
    """Rows of equal length over a stock cache that holds the prefill."""

    def __init__(self, model: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any], ids: Tensor) -> None:
        self.model, self.cache, self.ids = model, cache, ids
        self.length = cache.get_seq_length()
        self.kwargs = {k: v for k, v in model_kwargs.items() if k not in ("past_key_values", "logits_to_keep")}
        self.is_simple = prepares_stock_inputs(model) and takes_ragged_inputs(model, model_kwargs)
        self.prompt_length = self.length
        cache.activate_past_recording()

    @property
    def lengths(self) -> list[int]:
        return [self.length] * self.ids.shape[0]

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Any:
        """Append tokens [B, T] to every row; outputs with logits [B, T, V]. No trees here."""
        assert parents is None, "trees need the ragged runner"
        self.length += tokens.shape[1]
        self.ids = torch.cat([self.ids, tokens], dim=1)
        if self.is_simple:
            # What the call below comes to, at a fraction of its time (a light draft notices).
            return self.model(input_ids=tokens, past_key_values=self.cache, **self.kwargs | self._next(tokens.shape[1]))
        inputs = self.model.prepare_inputs_for_generation(
            self.ids,
            next_sequence_length=tokens.shape[1],
            past_key_values=self.cache,
            **self.kwargs | self._grown(),
        )
        return self.model(**inputs, return_dict=True)

    def _next(self, width: int) -> dict[str, Tensor]:
        """Mask of all columns and positions of the last `width` ones."""
        inputs = {}
        if (mask := self.kwargs.get("attention_mask")) is not None:
            inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), self.length - mask.shape[1])], dim=1)
        if (positions := self.kwargs.get("position_ids")) is not None:
            end = self.length - self.prompt_length + 1
            inputs["position_ids"] = positions[:, -1:] + torch.arange(end - width, end, device=positions.device)
        return inputs

    def _grown(self) -> dict[str, Tensor]:
        """The prompt's mask, positions and token types, carried on to the present length as plain decoding does."""
        grown = {}
        for name, value in self.kwargs.items():
            more = self.length - value.shape[-1] if isinstance(value, Tensor) and value.ndim else 0
            if name == "attention_mask" and value is not None:
                grown[name] = torch.cat([value, value.new_ones(value.shape[0], more)], dim=-1)
            elif name == "position_ids" and value is not None:
                steps = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
                grown[name] = torch.cat([value, value[..., -1:] + steps], dim=-1)
            elif name == "token_type_ids" and value is not None:
                grown[name] = torch.cat([value, value[..., -1:].expand(*value.shape[:-1], more)], dim=-1)
            elif name.endswith("token_type_ids") and value is not None:
                grown[name] = torch.cat([value, value.new_zeros(*value.shape[:-1], more)], dim=-1)
        return grown

    def truncate(self, lengths: list[int]) -> None:
        """Roll back to a common length. Must follow every forward: it also trims what sliding layers recorded."""
        removed = self.length - lengths[0]
        self.cache.crop(-removed)
        self.ids = self.ids[:, : self.ids.shape[1] - removed]
        self.length = lengths[0]

    def finish(self, ids: Tensor) -> None:
        """Leave the cache as plain decoding would."""
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RetiredRow(NamedTuple):
    """A row that has stopped: what its part of the cache held."""

    length: int
    states: list[tuple[Tensor, Tensor]]
    visible: Tensor
    next_position: Tensor


class RaggedRunner:
    """Rows of any lengths over a `RaggedCache` adopted from a stock cache that holds the prefill."""

    def __init__(self, model: PreTrainedModel, stock: Cache, model_kwargs: dict[str, Any], prompt_columns: int) -> None:
        """
        Args:
            prompt_columns: columns of the call's `input_ids`; fewer than the cache holds where it was continued.
        """
        self.model, self.stock, self.prompt_columns = model, stock, prompt_columns
        self.cache = RaggedCache(stock)
        self.columns = stock.get_seq_length()
        rows, device = len(self.cache.lengths), self.cache.device
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        self.visible = (
            torch.ones(rows, self.columns, dtype=torch.bool, device=device) if mask is None else mask.bool().to(device)
        )
        if positions is None:
            positions = self.visible.long().cumsum(-1) - 1
        self.next_position = (positions[:, -1:] + 1).expand(rows, 1).to(device)
        self.windows = _windows(model, self.cache)

        self.limit = position_limit(model)
        self.rows = list(range(rows))
        self.retired: dict[int, RetiredRow] = {}

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def forward(self, tokens: Tensor, parents: Tensor | None = None, counts: list[int] | None = None) -> Any:
        """Append tokens [B, T] to each row; logits [B, T, V].

        Args:
            parents: [B, T] index of each token's parent among the T, -1 for the row's last one; None for a chain.
            counts: [B] how many of the T count in each row (the others are overwritten by the next forward).
        """
        lengths = self.cache.lengths
        width = tokens.shape[1]
        self.cache.reserve(width)
        seen, depth = self._new_tokens(parents, width)
        outputs = self.model(
            input_ids=tokens,
            attention_mask=self._masks(seen, depth, max(lengths) + width),
            position_ids=self._positions(depth),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        added = counts or [width] * len(lengths)
        self.cache.set_lengths([length + n for length, n in zip(lengths, added, strict=True)])
        return outputs

    def _positions(self, depth: Tensor) -> Tensor:
        """[B, T]; columns that do not count in a short row stay below the limit of learned embeddings."""
        first = self.next_position + (self.cache.lengths_tensor[:, None] - self.columns)
        return torch.minimum(first + depth, first.clamp_min(self.limit - 1))

    def _new_tokens(self, parents: Tensor | None, width: int) -> tuple[Tensor | None, Tensor]:
        """Which new tokens each new token sees [B, T, T] (None in a chain: itself and all before), and how far each is
        below the first [1 or B, T]."""
        device = self.cache.device
        if parents is None:
            return None, torch.arange(width, device=device)[None]
        seen = torch.eye(width, dtype=torch.bool, device=device).repeat(parents.shape[0], 1, 1)
        for node in range(1, width):  # parents come before their children
            above = parents[:, node].clamp_min(0)[:, None, None].expand(-1, 1, width)
            seen[:, node] |= seen.gather(1, above)[:, 0]
        return seen, seen.sum(-1) - 1

    def _masks(self, seen: Tensor | None, depth: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Additive 4-D masks [B, 1, T, end], one per kind of layer where a model has several."""
        # Distance in positions from a query [B, T] to each slot [end]: negative for what comes after it.
        offset = torch.arange(end, device=self.cache.device) - self.cache.lengths_tensor[:, None, None]
        distance = depth[:, :, None] - offset
        allowed = distance >= 0
        if seen is not None:  # a tree: new tokens count by depth, not by slot, and see what lies above them only
            rows, width = len(self.cache.lengths), seen.shape[2]
            new = offset.clamp(0, width - 1).expand(rows, width, -1)
            is_new = (offset >= 0) & (offset < width)
            depths = depth[:, None].expand(rows, width, -1).gather(2, new)
            distance = torch.where(is_new, depth[:, :, None] - depths, distance)
            allowed = (offset < 0) | is_new & seen.expand(rows, -1, -1).gather(2, new)
        allowed[:, :, : self.columns] &= self.visible[:, None]
        masks = {}
        for kind, window in self.windows.items():
            inside = allowed if window is None else allowed & (distance < window)
            bias = torch.zeros(inside.shape, dtype=self.model.dtype, device=inside.device)
            masks[kind] = bias.masked_fill_(~inside, torch.finfo(self.model.dtype).min)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def truncate(self, lengths: list[int]) -> None:
        """Roll every row back to its length."""
        if lengths != self.cache.lengths:
            self.cache.set_lengths(lengths)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Roll back to `lengths`, then keep the tokens of an accepted path (indices after that length)."""
        self.cache.set_lengths(lengths)
        self.cache.keep(paths)
        self.cache.set_lengths([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch only."""
        self.cache.select(rows)
        index = torch.tensor(rows, dtype=torch.long, device=self.cache.device)
        self.visible, self.next_position = self.visible[index], self.next_position[index]
        self.rows = [self.rows[row] for row in rows]

    def retire(self, stay: list[int], keep: bool) -> None:
        """Go on with the rows `stay`; put the others' keys and values aside where they are still wanted."""
        for b in set(range(len(self.rows))) - set(stay) if keep else ():
            self.retired[self.rows[b]] = RetiredRow(
                self.cache.lengths[b], self.cache.row(b), self.visible[b], self.next_position[b]
            )
        self.select(stay)

    def finish(self, ids: Tensor) -> None:
        """Write all rows, every one retired by now, into the stock cache as plain decoding leaves it.

        Plain decoding goes on feeding padding to rows that have stopped; one forward makes up for that.

        Args:
            ids: [B, columns] the whole output.
        """
        rows = [self.retired[row] for row in sorted(self.retired)]
        self.cache.assemble([row.states for row in rows], [row.length for row in rows])
        self.visible = torch.stack([row.visible for row in rows])
        self.next_position = torch.stack([row.next_position for row in rows])
        before = self.columns - self.prompt_columns
        final = before + ids.shape[1] - 1
        missing = [final - row.length for row in rows]
        if any(missing):
            tokens = ids.new_zeros(len(rows), max(missing))
            for b, (row, n) in enumerate(zip(rows, missing, strict=True)):
                tokens[b, :n] = ids[b, row.length - before : final - before]
            self.forward(tokens.to(self.model.device), counts=missing)
        self.cache.restore(self.stock, final)


def _windows(model: PreTrainedModel, cache: RaggedCache) -> dict[str, int | None]:
    """The attention window of each kind of layer the model's masks are keyed by (one key: the mask is a tensor)."""
    # Not from the cache: one that the user made without a config knows of no windows.
    layers = DynamicCache(config=model.config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers] or [None] * len(cache.layers)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise TypeError(f"no masks for layers of type {', '.join(sorted(unknown))}")
    if len(set(kinds)) == 1:
        return {kinds[0]: windows[0]}
    return {kind: windows[kinds.index(kind)] for kind in dict.fromkeys(kinds)}


def position_limit(model: PreTrainedModel) -> int:
    """Positions that a model's embeddings are made for."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31


def prepares_stock_inputs(model: PreTrainedModel) -> bool:
    """Whether nothing (the class, PEFT, remote code) has its own idea of the inputs of a decoding step."""
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return prepare is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()


def takes_ragged_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether the call's model inputs are ones the ragged runner can carry on."""
    accepted = inspect.signature(model.forward).parameters
    extra = {name for name, value in model_kwargs.items() if value is not None} - RAGGED_INPUTS
    positions = model_kwargs.get("position_ids")
    return "position_ids" in accepted and not extra and (positions is None or positions.ndim == 2)
