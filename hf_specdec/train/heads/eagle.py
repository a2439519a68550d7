"""An EAGLE-3 head steps over its own states (training-time test, Li et al. 2025, Section 3.2).

Step 0 reads the target's states at its root and the token behind, step j what step j - 1 has passed on and the next
token. It sees step 0 of all places up to its root, and of the later steps those of its own chain.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from ...drafters.heads.eagle_model import FUSED, LlamaForCausalLMEagle3
from ...drafters.heads.parts import embedded
from .beginning import begin_output, begun, scale_of
from .learner import Learner, Step

WIDENED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
"""weights of the head's layer that read e beside the state"""
NORMS = {"input_layernorm", "post_attention_layernorm"}
"""of a layer such as a Llama's"""


class EagleLearner(Learner):
    """Every place of a text is a root."""

    decay = 0.8  # as in SafeAILab's training

    def __init__(self, head: LlamaForCausalLMEagle3, target: PreTrainedModel, steps: int) -> None:
        super().__init__(head, target, head.tokens, head.fc, steps)

    def forward(self, batch: dict[str, Tensor]) -> list[Step]:
        ids, cache, found = batch["input_ids"], DynamicCache(), []
        g = self.head.fused(self.states(batch, self.head.fc.weight.dtype))
        starts = batch["at"][:, :1]  # each text's first place
        at = torch.arange(g.shape[1], device=ids.device)
        seen = at[:, None] >= at
        for j in range(self.steps):
            tokens = nn.functional.pad(ids, (0, j))[:, 1 + j :]  # what is padded is behind the text's end
            e = embedded(self._embeddings[0], tokens).to(g.dtype)
            g, normed = self.head(g, e, at[None] + j, seen[None, None], cache)
            places = (at >= starts) & (at < batch["lengths"][:, None] - 2 - j)
            found.append(Step(self.head.lm_head(normed[places]).float(), places))
            seen = torch.cat([seen, at[:, None] == at], dim=-1)
        return found


def beginning(config: LlamaConfig, target: PreTrainedModel, tokens: Tensor, seed: int) -> LlamaForCausalLMEagle3:
    """A head that begins with the highest state it reads, the target's last layer where it is alike, and its output.

    Args:
        tokens: [K] sorted, those that the head knows.
    """
    head = begun(lambda: LlamaForCausalLMEagle3(config), seed)
    head.know(tokens)
    width = head.fc.in_features // FUSED
    with torch.no_grad():
        head.fc.weight.zero_()[:, -width:].copy_(torch.eye(width))
        for last in getattr(target.get_decoder(), "layers", [])[-1:]:
            if {name for name, _ in last.named_children() if "norm" in name} == NORMS:
                take_over(head.midlayer, last)
    begin_output(head, target, tokens)
    return head.to(target.device)


def take_over(mine: nn.Module, theirs: Any) -> None:
    """Copy what another layer has of the same names and sizes. What it does with its input, the head does with the
    state; what reads the embeddings beside it stays as it is."""
    found: dict[str, Tensor] = dict(theirs.named_parameters())
    found |= {f"{name}.weight": scale_of(getattr(theirs, name)) for name in NORMS}
    found["hidden_norm.weight"] = found.pop("input_layernorm.weight")
    for name, weight in mine.named_parameters():
        part = weight[:, weight.shape[1] // 2 :] if name in WIDENED else weight
        if name in found and found[name].shape == part.shape:
            part.copy_(found[name])
