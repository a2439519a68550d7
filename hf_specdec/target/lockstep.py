"""`LockstepRunner`: rows keep equal lengths. It runs over transformers' own cache, without masks where there is no
padding, with the model's own 2-D mask otherwise, and rolls back with `crop`: any model that can do that will do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..protocol import Feature, Forward
from ..transfer import to_device
from .cache import Slots, holding
from .compiled import uncompiled
from .encoder_decoder import as_said
from .features import asking, shown
from .grouped import attending
from .inputs import CACHE, RAGGED_INPUTS, own_cache, prepares_stock_inputs, takes_ragged_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


AHEAD = 256
"""columns for which positions are made at once"""


class LockstepRunner:
    """Rows of equal length over a stock cache."""

    widths: Sequence[int] = ()

    def __init__(
        self, model: "PreTrainedModel", model_kwargs: dict[str, Any], ids: Tensor, new_columns: int | None = None
    ) -> None:
        """
        Args:
            model_kwargs: `generate`'s own, the cache among them.
            ids: [B, P] the prompt.
            new_columns: how many of the last columns the cache does not hold yet; None for all.
        """
        self.model, self.ids, self.model_kwargs, self.new_columns = model, ids, model_kwargs, new_columns
        self.bare = uncompiled(model)
        self.whole = model_kwargs[CACHE]
        self.cache = own_cache(self.whole)
        """of the text alone"""
        self.is_simple = prepares_stock_inputs(model) and takes_ragged_inputs(model, model_kwargs)
        not_again = {CACHE, "logits_to_keep"}
        if self.is_simple:
            not_again |= {"inputs_embeds"} | (model_kwargs.keys() - RAGGED_INPUTS)
        self.kwargs = {k: v for k, v in model_kwargs.items() if k not in not_again}
        self.features: Sequence[Feature] = ()
        self.length = self.prompt_length = 0
        self._positions: Tensor | None = None
        """[B, columns] of the present columns and some more, counted on from the prompt's last"""

    @property
    def lengths(self) -> list[int]:
        return [self.length] * self.ids.shape[0]

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it."""
        answer = prefill(self.model, self.ids, self.model_kwargs, self.new_columns, self.features)
        self.length = self.prompt_length = self.cache.get_seq_length()
        self.cache.activate_past_recording()
        return answer

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        """Append tokens [B, T] to every row. No trees and no uneven rows here."""
        assert parents is None and counts is None, "trees and uneven rows need the ragged runner"
        width = tokens.shape[1]
        self.length += width
        if self.is_simple:
            # What the call below comes to, at a fraction of its time (a light draft notices).
            inputs = self.kwargs | self._next(width) | {"input_ids": tokens, CACHE: self.cache}
        else:
            self.ids = torch.cat([self.ids, tokens], dim=1)
            inputs = self.model.prepare_inputs_for_generation(
                self.ids, next_sequence_length=width, **self.kwargs | self._grown() | {CACHE: self.whole}
            )
            if "logits_to_keep" in inputs:  # some classes ask for one here, whatever they are fed
                inputs["logits_to_keep"] = 0
            inputs["return_dict"] = True
        compute = self.model if width == 1 else self.bare
        with attending(compute):
            outputs = compute(**inputs | asking(self.features))
        return answered(outputs, width, self.features)

    def _next(self, width: int) -> dict[str, Tensor]:
        """Mask of all columns and positions of the last `width` ones."""
        inputs = {}
        if (mask := self.kwargs.get("attention_mask")) is not None:
            inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), self.length - mask.shape[1])], dim=1)
        if (positions := self.kwargs.get("position_ids")) is not None:
            if self._positions is None or self._positions.shape[1] < self.length:
                first = positions[:, -1:] + 1 - self.prompt_length
                self._positions = first + torch.arange(self.length + AHEAD, device=positions.device)
            inputs["position_ids"] = self._positions[:, self.length - width : self.length]
        return inputs

    def _grown(self) -> dict[str, Tensor]:
        """The text's mask, positions and token types, carried on to the present length as plain decoding does. Beside
        an encoder's they have names of their own."""
        grown, own = {}, "" if self.whole is self.cache else "decoder_"
        for name, value in self.kwargs.items():
            if not (isinstance(value, Tensor) and value.ndim and name.startswith(own)):
                continue
            kind, more = name.removeprefix(own), self.length - value.shape[-1]
            if kind == "attention_mask":
                grown[name] = torch.cat([value, value.new_ones(len(value), more)], dim=-1)
            elif kind == "position_ids":
                steps = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
                grown[name] = torch.cat([value, value[..., -1:] + steps], dim=-1)
            elif kind == "token_type_ids":
                grown[name] = torch.cat([value, value[..., -1:].expand(*value.shape[:-1], more)], dim=-1)
            elif kind.endswith("token_type_ids"):
                grown[name] = torch.cat([value, value.new_zeros(*value.shape[:-1], more)], dim=-1)
        return grown

    def truncate(self, lengths: list[int]) -> None:
        """Roll back to a common length. Must follow every forward: it also trims what sliding layers recorded."""
        removed = self.length - lengths[0]
        self.cache.crop(-removed)
        if not self.is_simple:
            self.ids = self.ids[:, : self.ids.shape[1] - removed]
        self.length = lengths[0]

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Of chains, which are all that is fed here: to keep a path is to truncate behind it."""
        self.truncate([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        index = to_device(rows, self.ids.device)
        self.whole.reorder_cache(index)  # which every kind of layer can, states and indexers too
        self.ids, self._positions = self.ids[index], None
        self.kwargs = {name: _selected(name, value, index) for name, value in self.kwargs.items()}

    def retire(self, stay: list[int], keep: bool) -> None:
        """Rows that have stopped are fed on with padding, as plain decoding does: nobody leaves."""

    def finish(self, ids: Tensor | None) -> None:
        """Leave the cache as plain decoding would. After an interrupt its layers may have got unevenly far; sliding
        ones that have let go of the prompt's last window cannot be rolled back to it."""
        layers = holding(self.cache)
        if ids is None and all(_holds(layer, self.prompt_length) for layer in layers):
            for layer in layers:
                layer.crop(-max(0, layer.get_seq_length() - self.prompt_length))
        for layer in layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


def _selected(name: str, value: Any, index: Tensor) -> Any:
    """These rows of a model's input."""
    if hasattr(value, "last_hidden_state"):
        states, mask = value.last_hidden_state, getattr(value, "attention_mask", None)
        return as_said(_selected("", states, index), _selected("", mask, index))
    if not (isinstance(value, Tensor) and value.ndim):
        return value
    # Positions of several axes, as those of images, have them before the rows.
    return value.index_select(value.ndim - 2 if name == "position_ids" else 0, index.to(value.device))


def _holds(layer: CacheLayerMixin, columns: int) -> bool:
    """Whether a layer holds all that can be seen from behind its first `columns`."""
    window = getattr(layer, "sliding_window", None)
    if window is None or not layer.is_initialized:
        return True
    return layer.get_seq_length() - layer.keys.shape[-2] <= max(0, columns - window + 1)


def prefill(
    model: "PreTrainedModel",
    ids: Tensor,
    model_kwargs: dict[str, Any],
    new_columns: int | None,
    features: Sequence[Feature] = (),
    all_logits: bool = False,
) -> Forward:
    """The first forward, as plain decoding does it; `model_kwargs` are `generate`'s own.

    Args:
        ids: [B, P].
        new_columns: how many of the last columns the cache does not hold yet; None for all.
        features: to give, by name.
        all_logits: after every column, not after the last one only.
    """
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=new_columns, is_first_iteration=True, **model_kwargs
    )
    if inputs.get(CACHE) is None:  # Phi-3 lets go of it before a prompt beyond its first rotary factors
        inputs[CACHE] = model_kwargs.get(CACHE)
    inputs |= asking(features)
    if all_logits and "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = 0
    outputs, width = model(**inputs, return_dict=True), ids.shape[1] if new_columns is None else new_columns
    logits = outputs.logits if all_logits else outputs.logits[:, -1:]
    return Forward(logits, features=shown(outputs, features, width), outputs=outputs)


def answered(outputs: Any, width: int, features: Sequence[Feature], slots: Slots | None = None) -> Forward:
    """A model's outputs as a `Forward`.

    Args:
        slots: as of `shown`.

    Raises:
        RuntimeError: there are not as many logits as tokens were fed.
    """
    if outputs.logits.shape[1] != width:
        raise RuntimeError(f"the target gave {outputs.logits.shape[1]} logits for {width} tokens")
    return Forward(outputs.logits, features=shown(outputs, features, width, slots), outputs=outputs)
