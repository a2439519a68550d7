"""A draft cut out of its target: a few of its layers, and the rows of its embedding that its texts need most."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from ...drafters.draft_model.cut import CutLlamaConfig, CutLlamaForCausalLM
from ...errors import SpeculationError


def cut(target: PreTrainedModel, layers: Sequence[int], tokens: Tensor) -> CutLlamaForCausalLM:
    """A draft of these layers of a Llama, and of these tokens; any other is read as the nearest of them.

    Args:
        tokens: [K] sorted ids.

    Raises:
        SpeculationError: see `check_cuttable`.
    """
    check_cuttable(target, layers)
    options = {name: value for name, value in target.config.to_dict().items() if name not in ("model_type", "dtype")}
    options |= {"num_hidden_layers": len(layers), "known_tokens": len(tokens)}
    options |= {"architectures": None, "layer_types": None}
    draft = CutLlamaForCausalLM(CutLlamaConfig(**options))
    rows, head = (layer.weight.detach() for layer in (target.get_input_embeddings(), target.get_output_embeddings()))
    draft.token_of.copy_(tokens)
    draft.row_of.copy_(_nearest(rows.float(), tokens))
    draft.model.embed_tokens.weight.data.copy_(rows[tokens])
    draft.lm_head.weight.data.copy_(head[tokens])
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for mine, layer in zip(draft.model.layers, layers, strict=True):
        mine.load_state_dict(target.model.layers[layer].state_dict())
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def take_over(draft: CutLlamaForCausalLM, earlier: PreTrainedModel) -> None:
    """What an earlier cut of the same target has learned: its layers, and its rows of the tokens that both know.

    Raises:
        SpeculationError: it is no such cut.
    """
    tables = ("model.embed_tokens.weight", "lm_head.weight", "row_of", "token_of")
    ours, theirs = (
        {name: value for name, value in model.state_dict().items() if name not in tables} for model in (draft, earlier)
    )
    alike = {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    if not isinstance(earlier, CutLlamaForCausalLM) or earlier.vocab_size != draft.vocab_size or not alike:
        raise SpeculationError(
            f"start_from must be a draft that was cut out of this target with {len(draft.model.layers)} layers, "
            f"got a {type(earlier).__name__} with {earlier.config.num_hidden_layers}"
        )
    draft.load_state_dict(theirs, strict=False)
    rows = earlier.row_of[draft.token_of]
    both = earlier.token_of[rows] == draft.token_of
    for mine, other in ((draft.model.embed_tokens, earlier.model.embed_tokens), (draft.lm_head, earlier.lm_head)):
        mine.weight.data[both] = other.weight.detach()[rows[both]].to(mine.weight)


def check_cuttable(target: PreTrainedModel, layers: Sequence[int]) -> None:
    """
    Raises:
        SpeculationError: the target is no Llama of plain weights, or has no such layers.
    """
    if type(target) is not LlamaForCausalLM:
        raise SpeculationError(
            f"target is a {type(target).__name__}, and a draft can be cut out of a LlamaForCausalLM only. For "
            "other models train a small model with the same tokenizer and pass it as --draft"
        )
    if getattr(target, "is_quantized", False):
        raise SpeculationError(
            "target is quantized, and a draft can be cut out of plain weights only; load it without quantization"
        )
    count = target.config.num_hidden_layers
    if not layers or any(not 0 <= layer < count for layer in layers):
        raise SpeculationError(f"layers must name at least one layer, from 0 to {count - 1}, got {list(layers)}")


def _nearest(rows: Tensor, tokens: Tensor) -> Tensor:
    """[V] which of the tokens' rows is most like each token's, by cosine."""
    rows = torch.nn.functional.normalize(rows, dim=-1)
    nearest = torch.cat([(part @ rows[tokens].T).argmax(-1) for part in rows.split(4096)])
    nearest[tokens] = torch.arange(len(tokens), device=nearest.device)
    return nearest
