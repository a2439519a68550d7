"""DFlash models as z-lab publishes them → transformers' DFlash model, which is the same under other names.

Their config is that of a Qwen3's layers, with `dflash_config` nested in it; their weights are `fc.weight` and
`hidden_norm.weight`, which make one state of those of several layers of the target, `layers.*` and `norm.weight`.
"""

from collections.abc import Collection
from typing import Any

from transformers import LlamaConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config

from .fields import family, layers, nested, refuse, whole
from .loading import Format

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


class DFlashFormat(Format):
    """Beside what transformers knows, the config has `causal_layers`, the kinds of layers that see nothing behind a
    place; `input_embedding_scale`, by which the rows of the target's table are multiplied; and `output_multiplier` and
    `final_logit_softcapping` of the logits."""

    names = NAMES

    def model(self, config: MuseGlimmerAssistantConfig, names: Collection[str]) -> MuseGlimmerAssistantModel:
        return MuseGlimmerAssistantModel(config)

    def config(self, content: dict[str, Any]) -> MuseGlimmerAssistantConfig:
        known, said = family(content, FAMILIES), content | nested(content, "dflash_config")
        refuse(said, NOT_HERE)
        read = {
            "block_size": whole(said.get("block_size", 16), "block_size", 2, 256),
            "mask_token_id": whole(said.get("mask_token_id"), "mask_token_id in dflash_config", 0, 2**31),
            "target_layer_ids": layers(said.get("target_layer_ids"), "target_layer_ids in dflash_config"),
        }
        layer: Any = known(**{name: content[name] for name in (*SIZES, *SEEN) if name in content})
        kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
        return MuseGlimmerAssistantConfig(
            **{name: getattr(layer, name) for name in (*SIZES, "rope_parameters")},
            **_window(kinds, getattr(layer, "sliding_window", None)),
            **{name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **{name: _number(said, name, default) for name, default in SCALES.items()},
            **read,
            layer_types=kinds,
            causal_layers=_causal(kinds, content.get("is_causal", nested(content, "dflash_config").get("causal"))),
            architectures=[MuseGlimmerAssistantModel.__name__],
        )


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


FORMAT = DFlashFormat()
