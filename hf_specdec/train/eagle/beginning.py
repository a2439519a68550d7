"""A head before its training: what its target has to give, and the rest random."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from ...drafters.heads.eagle_model import FUSED, LlamaForCausalLMEagle3
from ..teacher import output_rows

WIDENED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
"""weights of the head's layer that read e beside the state"""


def beginning(config: LlamaConfig, target: PreTrainedModel, tokens: Tensor, seed: int) -> LlamaForCausalLMEagle3:
    """A head that begins with the highest state it reads, the target's last layer as far as it is alike, the rows of
    its output head, and its last norm, scaled to one in the mean: a head that is wrong shall not be sure.

    Args:
        tokens: [K] sorted, those that the head knows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = LlamaForCausalLMEagle3(config)
    head.know(tokens)
    width = head.fc.in_features // FUSED
    with torch.no_grad():
        head.lm_head.weight.copy_(output_rows(target, tokens))
        head.fc.weight.zero_()[:, -width:].copy_(torch.eye(width))
        inner: Any = target.get_decoder()
        if hasattr(inner, "layers"):
            take_over(head.midlayer, inner.layers[-1])
        norm, own = getattr(getattr(inner, "norm", None), "weight", None), head.norm.get_parameter("weight")
        if norm is not None and norm.shape == own.shape:
            own.copy_(norm / norm.abs().mean())
    return head.to(target.device)


def take_over(mine: nn.Module, theirs: nn.Module) -> None:
    """Copy what another layer has of the same names and sizes. What it does with its input, the head does with the
    state; what reads the embeddings beside it stays as it is."""
    found: dict[str, Tensor] = dict(theirs.named_parameters())
    found["hidden_norm.weight"] = found.pop("input_layernorm.weight", torch.empty(0))
    for name, weight in mine.named_parameters():
        part = weight[:, weight.shape[1] // 2 :] if name in WIDENED else weight
        if name in found and found[name].shape == part.shape:
            part.copy_(found[name])
