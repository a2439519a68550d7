"""What transformers hands to `custom_generate`, as a `Call`."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from ..engine.call import Call
from ..target.compiled import compiles
from ..target.inputs import CACHE, cached_columns
from ..verify.rules import Rules


def calls(streamer: Any, named: dict[str, Any], rules: Rules) -> Callable[..., Call]:
    """Makes a `Call` of what transformers hands to `custom_generate`."""
    user_cache = named.get(CACHE)
    held = cached_columns(user_cache) if user_cache is not None else 0
    mask = named.get("attention_mask")
    given = next((named[name] for name in ("inputs", "input_ids") if named.get(name) is not None), None)

    def as_call(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Call:
        for name in ("synced_gpus", "assistant_model", "tokenizer", "streamer"):
            model_kwargs.pop(name, None)
        embeds = None if model.config.is_encoder_decoder else model_kwargs.get("inputs_embeds")
        columns = (input_ids if embeds is None else embeds).shape[1]
        # A continued cache: either the whole text was passed again, as embeddings always are, or only what is new.
        whole = held and (columns == mask.shape[1] if mask is not None and embeds is None else columns > held)
        pad = getattr(generation_config, "pad_token_id", None)
        return Call(
            target=model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            model_kwargs=model_kwargs,
            streamer=streamer,
            new_columns=columns - held if whole else None,
            keeps_cache=user_cache is not None or bool(generation_config.return_dict_in_generate),
            pad_token_id=_pad_id(generation_config) if pad is None else int(pad),
            rules=rules,
            notice=_of_compiling(model, generation_config, model_kwargs),
            source=_source(model, named, given, model_kwargs) if model.config.is_encoder_decoder else None,
        )

    return as_call


def _source(model: Any, named: dict[str, Any], given: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the encoder read, a row for each text (`num_return_sequences` makes several of one), and what it said."""
    said = model_kwargs["encoder_outputs"]
    rows = len(said[0])
    source = {"encoder_outputs": said, "attention_mask": model_kwargs.get("attention_mask")}
    read = named.get(model.main_input_name)
    read = given if read is None else read
    if read is not None:
        source[model.main_input_name] = read.repeat_interleave(rows // len(read), dim=0)
    return source


def _pad_id(config: GenerationConfig) -> int:
    """Plain decoding pads with the first EOS where no padding token is set."""
    eos = config.eos_token_id
    if isinstance(eos, torch.Tensor):
        eos = eos.flatten().tolist()
    if isinstance(eos, (list, tuple)):
        eos = eos[0] if eos else None
    return 0 if eos is None else int(eos)


def _of_compiling(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str:
    """What a user should know for whom transformers would compile the forward; empty where it would not, or the user
    has."""
    would_be = getattr(model, "_valid_auto_compile_criteria", None)
    if would_be is not None and not compiles(model) and would_be(model_kwargs, config):
        return (
            "plain decoding would be compiled, and calls with a drafter are not. The text is not affected; compare "
            "both speeds"
        )
    return ""
