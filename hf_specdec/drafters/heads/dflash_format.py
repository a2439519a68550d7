"""DFlash models and their kin as others publish them → transformers' DFlash model, and what is beside it.

z-lab's config is that of a Qwen3's layers, with `dflash_config` nested in it. In that of `speculators` the layers' is
nested; in DeepSpec's all stands side by side. The weights of all are `fc.weight` and `hidden_norm.weight`, which make
one state of those of several layers of the target, `layers.*` and `norm.weight`.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config

from ...hub.registry import SPECULATORS_TYPE
from .dflash_model import BlockDiffusionModel
from .dspark_model import KINDS
from .fields import family, layers, nested, one_of, refuse, whole
from .loading import Format, check_known

NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""theirs → transformers', where they differ"""
FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig}
"""whose defaults a config has, by `model_type`"""
OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""weights that others write down, too: the target has them, or d2t says the same"""
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
NOT_HERE = ("attention_bias", "quantization_config", "use_swa", "attention_sink_bias", "selector_vocab_size")
"""fields that say that the model is another one"""


class DFlashFormat(Format):
    """Beside what transformers knows, the config has `causal_layers`, the kinds of layers that see nothing behind a
    place; `one_window`, whether a block has that of its first place; `sample_from_anchor`, whether the state at the
    last token foretells the one behind it; `input_embedding_scale`, by which the rows of the target's table are
    multiplied; and `output_multiplier` and `final_logit_softcapping` of the logits."""

    names = NAMES
    unused = OF_TARGET

    def model(self, config: MuseGlimmerAssistantConfig, names: Collection[str]) -> MuseGlimmerAssistantModel:
        return (BlockDiffusionModel if hasattr(config, "draft_vocab_size") else MuseGlimmerAssistantModel)(config)

    def config(self, content: dict[str, Any]) -> MuseGlimmerAssistantConfig:
        if content.get("model_type") == MuseGlimmerAssistantConfig.model_type:  # as it is saved here
            return MuseGlimmerAssistantConfig.from_dict(content)
        read = _of_deepspec if "markov_rank" in content else _of_zlab
        stored, said = _of_speculators(content) if SPECULATORS_TYPE in content else read(content)
        known = family(stored, FAMILIES)
        layer: Any = known(**{name: stored[name] for name in (*SIZES, *SEEN) if name in stored})
        kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
        causal = said.pop("causal")
        return MuseGlimmerAssistantConfig(
            **{name: getattr(layer, name) for name in (*SIZES, "rope_parameters")},
            **_window(kinds, getattr(layer, "sliding_window", None), said.get("one_window", False)),
            **{name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **said,
            layer_types=kinds,
            causal_layers=_causal(kinds, causal),
            architectures=["BlockDiffusionModel" if "draft_vocab_size" in said else MuseGlimmerAssistantModel.__name__],
        )

    def completed(self, model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if "d2t" in weights:
            weights["d2t"] = weights["d2t"].long()
            check_known(weights["d2t"], model.config.vocab_size)
        return weights


def _of_zlab(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layers' config, and what the model's has beside that."""
    said = content | nested(content, "dflash_config")
    refuse(said, NOT_HERE)
    second = content.get("architectures") == ["DFlash2DraftModel"]
    return content, {
        "block_size": whole(said.get("block_size", 16), "block_size", 2, 256),
        "mask_token_id": whole(said.get("mask_token_id"), "mask_token_id in dflash_config", 0, 2**31),
        "target_layer_ids": layers(said.get("target_layer_ids"), "target_layer_ids in dflash_config"),
        "causal": said.get("is_causal", said.get("causal")),
        "sample_from_anchor": bool(said.get("sample_from_anchor")),
        **{name: _number(said, name, default) for name, default in SCALES.items()},
    } | (_of_dflash2(said) if second else {})


def _of_speculators(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `_of_zlab`. It counts hidden states, 0 the embeddings, where z-lab counts layers."""
    layer, kind = nested(content, "transformer_layer_config"), content[SPECULATORS_TYPE]
    refuse(layer | content, NOT_HERE)
    one_of(content.get("target_hidden_size"), "target_hidden_size", [None, layer.get("hidden_size")])
    vocab, states = whole(layer.get("vocab_size"), "vocab_size", 1, 2**31), content.get("aux_hidden_state_layer_ids")
    return layer, {
        "block_size": whole(content.get("block_size", 8), "block_size", 2, 256),
        "mask_token_id": whole(content.get("mask_token_id"), "mask_token_id", 0, 2**31),
        "target_layer_ids": [state - 1 for state in layers(states, "aux_hidden_state_layer_ids")],
        "causal": False if content.get("sliding_window_non_causal", kind == "dflash2") else None,
        "one_window": True,
        "sample_from_anchor": bool(content.get("sample_from_anchor", kind == "dspark")),
        "input_embedding_scale": 1.0,
        "vocab_size": vocab,
        "draft_vocab_size": whole(content.get("draft_vocab_size"), "draft_vocab_size", 1, vocab),
    } | (BESIDE[kind](layer | content) if kind in BESIDE else {})


def _of_deepspec(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `_of_zlab`. Its DFlash models are DSpark models without what makes them such."""
    refuse(content, NOT_HERE)
    vocab = whole(content.get("vocab_size"), "vocab_size", 1, 2**31)
    return content, {
        "block_size": whole(content.get("block_size"), "block_size", 2, 256),
        "mask_token_id": whole(content.get("mask_token_id"), "mask_token_id", 0, 2**31),
        "target_layer_ids": layers(content.get("target_layer_ids"), "target_layer_ids"),
        "causal": False,
        "one_window": True,
        "sample_from_anchor": True,
        "input_embedding_scale": 1.0,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
    } | _of_dspark(content)


def _of_xpress(said: dict[str, Any]) -> dict[str, Any]:
    """What makes it one."""
    refuse(said, ["xpress_selector"])
    one_of(said.get("xpress_backbone", "dflash"), "xpress_backbone", ["dflash"])
    return {
        "xpress_rank": whole(said.get("xpress_rank", 256), "xpress_rank", 1, 2**16),
        "xpress_mlp_ratio": whole(said.get("xpress_mlp_ratio", 2), "xpress_mlp_ratio", 1, 256),
    }


def _of_dflash2(said: dict[str, Any]) -> dict[str, Any]:
    """What makes it one. It knows all tokens of the target."""
    vocab = whole(said.get("vocab_size"), "vocab_size", 1, 2**31)
    return {
        "vocab_size": vocab,
        "draft_vocab_size": whole(said.get("draft_vocab_size", vocab), "draft_vocab_size", vocab, vocab),
        "conv_kernel_size": whole(said.get("conv_kernel_size", 2), "conv_kernel_size", 1, 256),
        "conv_group_size": whole(said.get("conv_group_size", 16), "conv_group_size", 1, 2**16),
        "selector_rank": whole(said.get("selector_rank", 256), "selector_rank", 1, 2**16),
        "selector_top_k": whole(said.get("selector_top_k", 16), "selector_top_k", 1, vocab),
    }


def _of_dspark(content: dict[str, Any]) -> dict[str, Any]:
    """What makes it one."""
    rank = whole(content.get("markov_rank", 256), "markov_rank", 0, 2**16)
    reads_token = bool(content.get("confidence_head_with_markov", True)) and rank > 0
    return {
        "markov_rank": rank,
        "markov_head_type": one_of(content.get("markov_head_type", "vanilla"), "markov_head_type", KINDS),
        "enable_confidence_head": bool(content.get("enable_confidence_head", True)),
        "confidence_head_with_markov": reads_token,
    }


def _number(said: dict[str, Any], name: str, default: float | None) -> float | None:
    found = said.get(name, default)
    return found if found is None else float(found)


def _window(kinds: list[str], window: int | None, whole_block: bool) -> dict[str, int]:
    """Theirs are places less than a window apart, itself among them; transformers' reach that much to either side, as
    does that of a whole block."""
    if "sliding_attention" not in kinds:
        return {}
    if window is None or window < 3:
        raise ValueError(f"sliding_window is {window} for layers of sliding attention; it must be at least 3")
    return {"sliding_window": window if whole_block else window - 1}


def _causal(kinds: list[str], said: bool | None) -> list[str]:
    """All kinds or none where a config says so; else those with a window."""
    return sorted({kind for kind in kinds if (kind == "sliding_attention" if said is None else said)})


BESIDE = {"dflash2": _of_dflash2, "dspark": _of_dspark, "xpress": _of_xpress}
"""what `speculators`' kinds say beside a DFlash model's config"""
FORMAT = DFlashFormat()
