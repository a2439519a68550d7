"""Encoder-decoders: what their encoder said, and the caches of their decoder. What was said is kept once, in the
cross-attention cache that the prompt's forward fills; only the text's own keys and values grow and are rolled back."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from ..transfer import moved
from .devices import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    alone = type(model).__name__ == "WhisperForCausalLM"  # of distilled drafts, which share the encoder
    return bool(model.config.is_encoder_decoder or getattr(model.config, "add_cross_attention", False) or alone)


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
