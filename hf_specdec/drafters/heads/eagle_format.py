"""EAGLE-3 heads as others publish them: `config.json` and `model.safetensors` → `LlamaForCausalLMEagle3`.

Two formats. SafeAILab's, which SGLang, SpecForge and vLLM read: a Llama's config with `draft_vocab_size`, and weights
`midlayer.*`. `speculators`': the layer's config nested, and weights `layers.0.*`. They count layers differently, see
`_states_read`.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ...hub.registry import SPECULATORS_TYPE
from .eagle_model import FAMILIES, FUSED, LAYER_IDS, LlamaForCausalLMEagle3
from .fields import family, layers, nested, refuse, whole
from .loading import Format, check_known

NESTED = "transformer_layer_config"
FLAGS = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""what `speculators` says beside the layer's config"""
UNUSED = ("model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype")
EMBEDDINGS = "embed_tokens.weight"


class EagleFormat(Format):
    """`LlamaForCausalLMEagle3` of both formats."""

    optional = ("d2t", "t2d", EMBEDDINGS)
    unused = ("verifier_lm_head.weight", "verifier_norm.weight")

    def model(self, config: Any, names: Collection[str]) -> LlamaForCausalLMEagle3:
        return LlamaForCausalLMEagle3(config, embeds=EMBEDDINGS in names)

    def ours(self, name: str) -> str:
        name = super().ours(name)
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name

    def config(self, content: dict[str, Any]) -> Any:
        layer, beside = content, {}
        if SPECULATORS_TYPE in content:
            layer = nested(content, NESTED)
            beside = {name: content[name] for name in FLAGS if content.get(name) is not None}
            if content[SPECULATORS_TYPE] == "peagle":
                beside["mask_token_id"] = whole(content.get("mask_token_id"), "mask_token_id", 0, 2**31)
        config_class, *_ = family(layer, FAMILIES)
        refuse(layer, ["quantization_config"])
        options = {name: value for name, value in layer.items() if name not in UNUSED and not name.startswith("_")}
        read = _states_read(content)
        options |= beside | {LAYER_IDS: read, "architectures": [LlamaForCausalLMEagle3.__name__]}
        if read is not None and min(read) > 0:  # for SGLang, which reads layers there and nothing else
            options.setdefault("eagle_config", {LAYER_IDS: [state - 1 for state in read]})
        return config_class(**options)

    def completed(self, model: LlamaForCausalLMEagle3, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the tokens that the draft knows: all, where the file does not say it."""
        known, vocab = len(model.d2t), len(model.t2d)
        d2t = weights["d2t"].long() if "d2t" in weights else torch.zeros(known, dtype=torch.long)
        check_known(d2t, vocab)
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[d2t + torch.arange(known)] = True
        return weights | {"d2t": d2t, "t2d": t2d}


def _states_read(content: dict[str, Any]) -> list[int] | None:
    """Which hidden states are read, 0 the embeddings; None for those that are usual.

    `eagle_aux_hidden_state_layer_ids` are such numbers, as vLLM reads them, and `speculators` writes them. Within
    `eagle_config`, where SpecForge writes them and SGLang reads them, they are layers, whose outputs are meant.
    """
    inner = content.get("eagle_config")
    found, more = content.get(LAYER_IDS), 0
    if found is None and isinstance(inner, dict):
        found, more = inner.get(LAYER_IDS), 1
    return None if found is None else [one + more for one in layers(found, LAYER_IDS, FUSED)]


FORMAT = EagleFormat()
