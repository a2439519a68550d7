"""EAGLE-3 heads as others publish them: `config.json` and `model.safetensors` → `LlamaForCausalLMEagle3`.

Two formats. SafeAILab's, which SGLang, SpecForge and vLLM read: a Llama's config with `draft_vocab_size`, and weights
`midlayer.*`. `speculators`': the layer's config nested, and weights `layers.0.*`. They count layers differently, see
`_states_read`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import SpeculationError, one_line, shortened, shown
from ...hub.files import read_json
from ...hub.loading import CONFIG, WEIGHTS
from ...hub.published import read_weights, stored_names, with_weights, without_memory
from .model import FAMILIES, FUSED, LAYER_IDS, LlamaForCausalLMEagle3

NESTED = "transformer_layer_config"
FLAGS = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""what `speculators` says beside the layer's config"""
UNUSED = ("model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype")
EMBEDDINGS = "embed_tokens.weight"
OPTIONAL = ("d2t", "t2d", EMBEDDINGS)
"""what a file need not hold"""


def load_head(
    folder: Path,
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    quantization: str | None = None,
    pack_linear: bool = False,
    trust_remote_code: bool = False,
) -> LlamaForCausalLMEagle3:
    """The head in a folder; options as of `load_draft`.

    Raises:
        SpeculationError: no such head, weights that are not those of its config, pickles, or an option that heads do
            not take. Nothing is allocated before that is known.
    """
    what = "an EAGLE-3 head"
    stored = stored_names(folder, what, quantization)
    config, theirs = head_config(read_json(folder, CONFIG), folder / CONFIG), {_our_name(name): name for name in stored}
    make = partial(LlamaForCausalLMEagle3, config, embeds=EMBEDDINGS in theirs)
    head = without_memory(folder, make, config.num_hidden_layers, stored)
    weights = read_weights(folder, head, theirs, dtype, OPTIONAL)
    weights |= _vocabulary(head, weights.get("d2t"), folder)
    return with_weights(folder, head, weights, device_map, pack_linear, what)


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _vocabulary(head: LlamaForCausalLMEagle3, d2t: Tensor | None, folder: Path) -> dict[str, Tensor]:
    """Which tokens the draft knows: all, where the file does not say it."""
    known, vocab = len(head.d2t), len(head.t2d)
    d2t = torch.zeros(known, dtype=torch.long) if d2t is None else d2t.long()
    tokens = d2t + torch.arange(known)
    if known > vocab or not bool(((tokens >= 0) & (tokens < vocab)).all()) or len(tokens.unique()) < known:
        raise SpeculationError(
            f"{folder / WEIGHTS}: d2t must lead to {known} different tokens from 0 to {vocab - 1}; train the head again"
        )
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[tokens] = True
    return {"d2t": d2t, "t2d": t2d}


def head_config(content: dict[str, Any], path: Path) -> Any:
    """The config of `LlamaForCausalLMEagle3` that a published one describes.

    Raises:
        SpeculationError: it describes none that can be read.
    """
    nested = content.get(NESTED) if "speculators_model_type" in content else None
    if nested is not None and not isinstance(nested, dict):
        raise SpeculationError(f"{path}: {NESTED} is {shown(nested)}; it must be an object")
    layer = content if nested is None else nested
    kind = layer.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise SpeculationError(
            f"{path}: the head's layer is of type {shown(kind)}, and only {' and '.join(FAMILIES)} are supported; use "
            "another head"
        )
    if "quantization_config" in layer:
        raise SpeculationError(f"{path}: the head is quantized, which is not supported; use one of plain weights")
    options = {name: value for name, value in layer.items() if name not in UNUSED and not name.startswith("_")}
    if nested is not None:
        options |= {name: content[name] for name in FLAGS if content.get(name) is not None}
    read = _states_read(content, path)
    options |= {LAYER_IDS: read, "architectures": [LlamaForCausalLMEagle3.__name__]}
    if read is not None and min(read) > 0:  # for SGLang, which reads layers there and nothing else
        options.setdefault("eagle_config", {LAYER_IDS: [state - 1 for state in read]})
    try:
        return FAMILIES[kind][0](**options)
    except Exception as error:  # a config refuses values in its own ways
        raise SpeculationError(f"{path} does not describe a head: {shortened(one_line(error))}") from error


def _states_read(content: dict[str, Any], path: Path) -> list[int] | None:
    """Which hidden states are read, 0 the embeddings; None for those that are usual.

    `eagle_aux_hidden_state_layer_ids` are such numbers, as vLLM reads them, and `speculators` writes them. Within
    `eagle_config`, where SpecForge writes them and SGLang reads them, they are layers, whose outputs are meant.
    """
    inner = content.get("eagle_config")
    found, more = content.get(LAYER_IDS), 0
    if found is None and isinstance(inner, dict):
        found, more = inner.get(LAYER_IDS), 1
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != FUSED or any(type(one) is not int or one < 0 for one in found):
        raise SpeculationError(f"{path}: {LAYER_IDS} is {shown(found)}; it must be a list of {FUSED} layers")
    return [one + more for one in found]
