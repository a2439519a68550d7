"""DFlash models as z-lab publishes them → transformers' DFlash model, which is the same under other names.

Their config is that of a Qwen3's layers, with `dflash_config` nested in it; their weights are `fc.weight` and
`hidden_norm.weight`, which make one state of those of several layers of the target, `layers.*` and `norm.weight`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    LlamaConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    Qwen3Config,
)

from ...errors import SpeculationError, one_line, shortened, shown
from ...hub.files import read_json
from ...hub.loading import CONFIG
from ...hub.published import read_weights, stored_names, with_weights, without_memory

NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""theirs → transformers', where they differ"""
FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig}
"""whose defaults a config has, by `model_type`"""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)
SEEN = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)
"""which places a layer sees, and how it tells them apart"""
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""fields beside the layers', and their defaults"""
NOT_HERE = ("attention_bias", "quantization_config", "use_swa", "attention_sink_bias", "sample_from_anchor")
"""fields that say that the model is another one"""


def load_dflash(
    folder: Path,
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    quantization: str | None = None,
    pack_linear: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The DFlash model in a folder; options as of `load_draft`.

    Raises:
        SpeculationError: no such model, weights that are not those of its config, pickles, or an option that heads do
            not take. Nothing is allocated before that is known.
    """
    what = "a DFlash model"
    stored = stored_names(folder, what, quantization)
    config = dflash_config(read_json(folder, CONFIG), folder / CONFIG)
    make = partial(MuseGlimmerAssistantModel, config)
    model = without_memory(folder, make, config.num_hidden_layers, stored)
    theirs = {ours: name for name, ours in NAMES.items()}
    theirs |= {NAMES.get(name.removeprefix("model."), name.removeprefix("model.")): name for name in stored}
    return with_weights(folder, model, read_weights(folder, model, theirs, dtype), device_map, pack_linear, what)


def dflash_config(content: dict[str, Any], path: Path) -> MuseGlimmerAssistantConfig:
    """The config of transformers' DFlash model that a published one describes.

    Beside what transformers knows it has `causal_layers`, the kinds of layers that see nothing behind a place;
    `input_embedding_scale`, by which the rows of the target's table are multiplied; and `output_multiplier` and
    `final_logit_softcapping` of the logits.

    Raises:
        SpeculationError: it describes none that can be read.
    """
    family, inner = content.get("model_type"), content.get("dflash_config", {})
    if not isinstance(family, str) or family not in FAMILIES:
        raise SpeculationError(
            f"{path}: the layers are of type {shown(family)}, and only {' and '.join(FAMILIES)} are supported; use "
            "another DFlash model"
        )
    if not isinstance(inner, dict):
        raise SpeculationError(f"{path}: dflash_config is {shown(inner)}; it must be an object")
    said = content | inner
    if other := [name for name in NOT_HERE if said.get(name)]:
        raise SpeculationError(f"{path}: {other[0]} is {shown(said[other[0]])}, which is not supported; leave it out")
    block, mask, layers = said.get("block_size", 16), said.get("mask_token_id"), said.get("target_layer_ids")
    if type(block) is not int or not 2 <= block <= 256:
        raise SpeculationError(f"{path}: block_size is {shown(block)}; it must be a whole number from 2 to 256")
    if type(mask) is not int or mask < 0:
        raise SpeculationError(f"{path}: mask_token_id in dflash_config is {shown(mask)}; it must be a token's id")
    if not isinstance(layers, list) or not layers or any(type(one) is not int or one < 0 for one in layers):
        raise SpeculationError(
            f"{path}: target_layer_ids in dflash_config is {shown(layers)}; it must be a list of the target's layers"
        )
    try:
        layer: Any = FAMILIES[family](**{name: content[name] for name in (*SIZES, *SEEN) if name in content})
        kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
        return MuseGlimmerAssistantConfig(
            **{name: getattr(layer, name) for name in (*SIZES, "rope_parameters")},
            **_window(kinds, getattr(layer, "sliding_window", None)),
            **{name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **{name: _number(said, name, default) for name, default in SCALES.items()},
            layer_types=kinds,
            block_size=block,
            mask_token_id=mask,
            target_layer_ids=layers,
            causal_layers=_causal(kinds, content.get("is_causal", inner.get("causal"))),
            architectures=[MuseGlimmerAssistantModel.__name__],
        )
    except Exception as error:  # a config refuses values in its own ways
        raise SpeculationError(f"{path} does not describe a DFlash model: {shortened(one_line(error))}") from error


def _number(said: dict[str, Any], name: str, default: float | None) -> float | None:
    found = said.get(name, default)
    return found if found is None else float(found)


def _window(kinds: list[str], window: int | None) -> dict[str, int]:
    """Theirs are places less than a window apart, itself among them; transformers' reach that much to either side."""
    if "sliding_attention" not in kinds:
        return {}
    if window is None or window < 3:
        raise ValueError(f"sliding_window is {window} for layers of sliding attention; it must be at least 3")
    return {"sliding_window": window - 1}


def _causal(kinds: list[str], said: bool | None) -> list[str]:
    """All kinds or none where a config says so; else those with a window."""
    return sorted({kind for kind in kinds if (kind == "sliding_attention" if said is None else said)})
