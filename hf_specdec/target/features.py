"""What of a forward drafters may be shown beside its logits, by name: the index of a hidden state (0 the embeddings, -1
the last, after the norm), or the kind of layers whose keys and values the model shares with others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..protocol import Feature
from ..transfer import moved
from .cache import Slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARING = ("gemma4_text", "gemma4_unified_text")
"""types of models that tell the keys and values which they share"""


def shared_kinds(model: "PreTrainedModel") -> list[str]:
    """The kinds of layers that a model may be asked for."""
    config = model.config.get_text_config(decoder=True)
    return list(dict.fromkeys(config.layer_types)) if config.model_type in SHARING else []


def asking(features: Sequence[Feature]) -> dict[str, bool]:
    """The arguments with which a forward gives these."""
    return {"output_hidden_states" if isinstance(name, int) else "return_shared_kv_states": True for name in features}


def shown(outputs: Any, features: Sequence[Feature], width: int, slots: Slots | None = None) -> dict[Feature, Tensor]:
    """Of a model's outputs over `width` tokens what was asked for, [B, width, ...].

    Args:
        slots: where they stand in the cache; None for the last ones.
    """
    found: dict[Feature, Tensor] = {}
    for name in features:
        if isinstance(name, int):
            found[name] = outputs.hidden_states[name]
        else:
            found[name] = _of_tokens(outputs.shared_kv_states[name], width, slots)
    return found


def _of_tokens(shared: tuple[Tensor, Tensor], width: int, slots: Slots | None) -> Tensor:
    """Of keys and values [B, heads, S, size] those of the tokens, side by side: [B, width, 2 · heads · size]."""
    if slots is None:
        new = [states[:, :, states.shape[2] - width :].transpose(1, 2) for states in shared]
    else:
        rows, places = (moved(index, shared[0].device) for index in slots.after(width))
        new = [states[rows, :, places] for states in shared]
    return torch.cat([states.flatten(2) for states in new], dim=-1)
