"""`EncoderDecoderRunner`: the decoder of an encoder-decoder. What the encoder said is kept once, in the cross-attention
cache that the prompt's forward fills; only the text's own keys and values grow and are rolled back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from ..protocol import Forward
from ..transfer import moved, to_device
from .devices import input_device
from .features import asking
from .inputs import CACHE
from .lockstep import LockstepRunner, answered, longer_mask, longer_positions, prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EncoderDecoderRunner(LockstepRunner):
    """Rows of equal length over a stock cache."""

    def __init__(
        self, model: "PreTrainedModel", model_kwargs: dict[str, Any], ids: Tensor, new_columns: int | None = None
    ) -> None:
        super().__init__(model, model_kwargs, ids, new_columns)
        self.both, self.cache = self.cache, self.cache.self_attention_cache
        self.stock, self.is_simple = model_kwargs, False

    def prefill(self) -> Forward:
        """The decoder's prompt, and the encoder's states, as plain decoding reads them."""
        answer = prefill(self.model, self.ids, self.stock, self.new_columns, self.features)
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
        self.ids = torch.cat([self.ids, tokens], dim=1)
        inputs = self.model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=width, **self.kwargs | self._grown() | {CACHE: self.both}
        )
        extra = asking(self.features)
        return answered(self.model(**inputs | extra, return_dict=True), width, self.features)

    def _grown(self) -> dict[str, Tensor]:
        """The text's mask and positions, carried on to the present length; the encoder's mask stays."""
        grown = {}
        for name, value in self.kwargs.items():
            more = self.length - value.shape[-1] if isinstance(value, Tensor) and value.ndim else 0
            if name == "decoder_attention_mask" and value is not None:
                grown[name] = longer_mask(value, more)
            elif name == "decoder_position_ids" and value is not None:
                grown[name] = longer_positions(value, more)
        return grown

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        index = to_device(rows, self.ids.device)
        self.both.reorder_cache(index)
        self.ids = self.ids[index]
        self.kwargs = {name: _rows(value, index) for name, value in self.kwargs.items()}


def _rows(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value[index.to(value.device)]
    if hasattr(value, "last_hidden_state"):
        return as_said(_rows(value.last_hidden_state, index), _rows(getattr(value, "attention_mask", None), index))
    return value


def as_said(states: Tensor, mask: Tensor | None = None) -> Any:
    """An encoder's states [B, S, H] in the form that decoders take.

    Args:
        mask: of the states [B, S], of encoders that shorten their input and its mask (Moonshine).
    """
    from transformers.modeling_outputs import BaseModelOutput  # much comes with it, which few need

    said = BaseModelOutput(states)
    said.attention_mask = mask
    return said


def crosses(model: "PreTrainedModel") -> bool:
    """Whether a model reads what an encoder said: an encoder-decoder, or the decoder of one alone."""
    config: Any = model.config
    return bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False) or _is_decoder_alone(model))


def _is_decoder_alone(model: "PreTrainedModel") -> bool:
    """Such as `WhisperForCausalLM`, the way of distilled drafts: it shares the target's encoder."""
    return type(model).__name__ == "WhisperForCausalLM"


def fresh_cache(model: "PreTrainedModel") -> EncoderDecoderCache:
    """Nothing read, nothing written."""
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def encoded(model: "PreTrainedModel", source: dict[str, Any]) -> dict[str, Any]:
    """What a decoder is given of the source: its own encoder's states, or, for one without an encoder, the target's.

    Args:
        source: `DraftContext.source`.

    Raises:
        ValueError: the model has an encoder of its own, and the call holds nothing for it to read.
    """
    mask = source.get("attention_mask")
    mask = None if mask is None else moved(mask, input_device(model))
    if not model.config.is_encoder_decoder:
        states = moved(source["encoder_outputs"][0], input_device(model)).to(model.dtype)
        return {"encoder_outputs": as_said(states)}
    name = model.main_input_name
    if name not in source:
        raise ValueError(f"the draft model reads {name}, which was not passed to generate")
    given = moved(source[name], input_device(model))
    inputs = {name: given if not given.is_floating_point() else given.to(model.dtype)}
    said = model.get_encoder()(**inputs | ({} if mask is None else {"attention_mask": mask}), return_dict=True)
    kwargs: dict[str, Any] = {"encoder_outputs": as_said(said.last_hidden_state, getattr(said, "attention_mask", None))}
    return kwargs | ({} if mask is None else {"attention_mask": mask})
