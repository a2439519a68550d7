"""What a model's forward takes: asked before it is run, by whoever runs it."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput

from .attention import is_stock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""What transformers calls the cache, in inputs and outputs: `cache` from 5.24 on, `past_key_values` before."""

RAGGED_INPUTS = {
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}
"""Model inputs that the ragged runner makes itself, or that are the prompt's alone; any other asks for lockstep."""


def as_when_decoding(model: "PreTrainedModel") -> AbstractContextManager[Any]:
    """What transformers' own loop puts around its steps after the prompt: mixtures of experts decode by another kernel
    on a GPU."""
    switch = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if switch is None else switch()


def mixes_experts(model: "PreTrainedModel") -> bool:
    """Whether that makes a difference: whether the kernel for many tokens computes experts of this model."""
    kernels = getattr(model, "get_experts_implementation", None)
    return kernels is not None and "grouped_mm" in kernels().values()


def position_limit(model: "PreTrainedModel") -> int:
    """Positions that a model's embeddings, or an encoder-decoder's decoder's, are made for."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None) or 2**31


def ropes(model: "PreTrainedModel") -> list[dict[str, Any]]:
    """Settings of a model's rotary embeddings, of each kind of layer where there are several."""
    parameters: Any = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def own_cache(cache: Any) -> Any:
    """Of an encoder-decoder's two caches the text's own."""
    return getattr(cache, "self_attention_cache", cache)


def cached_columns(cache: Any) -> int:
    """How many columns of the text a cache holds; 0 where all its layers are states, which do not count them."""
    cache = own_cache(cache)
    layers = getattr(cache, "layers", [])
    only_states = layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers)
    return 0 if only_states else int(cache.get_seq_length())


def prepares_stock_inputs(model: "PreTrainedModel") -> bool:
    """Whether nothing (the class, PEFT, remote code) has its own idea of the inputs of a decoding step."""
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return prepare is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()


def prompt_is_stock(model: "PreTrainedModel") -> bool:
    """Whether a prompt's forward is one of transformers', which gives the logits of those columns that it is told."""
    takes = inspect.signature(model.forward).parameters
    return "logits_to_keep" in takes and is_stock(type(model).forward) and prepares_stock_inputs(model)


def is_idle(model: "PreTrainedModel", name: str, value: Any) -> bool:
    """Whether an input says nothing, as models that see are given some beside a text alone: no encoded images, and
    token types of which none is an image's. Models of text embed their types, zeros as well."""
    if name.endswith("token_type_ids") and value is not None:
        return (name.startswith("mm_") or hasattr(model.config, "vision_config")) and not bool(value.any())
    return value is None or (isinstance(value, dict) and not value)


def takes_ragged_inputs(model: "PreTrainedModel", model_kwargs: dict[str, Any]) -> bool:
    """Whether the call's model inputs are ones the ragged runner can carry on."""
    accepted = inspect.signature(model.forward).parameters
    extra = {name for name, value in model_kwargs.items() if not is_idle(model, name, value)} - RAGGED_INPUTS
    positions = model_kwargs.get("position_ids")
    return "position_ids" in accepted and not extra and (positions is None or positions.ndim == 2)
