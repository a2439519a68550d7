"""An EAGLE-3 head steps over its own states (training-time test, Li et al. 2025, Section 3.2).

Step 0 reads the target's states at its root and the token behind, step j what step j - 1 has passed on and the next
token. It sees step 0 of all places up to its root, and of the later steps those of its own chain.
"""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from ...drafters.heads.eagle_model import LlamaForCausalLMEagle3
from ...drafters.heads.parts import embedded
from .beginning import begin_output, begin_states, begun
from .learner import Learner, Step


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
    """A head that knows these tokens [K], which are sorted."""
    head = begun(lambda: LlamaForCausalLMEagle3(config), seed)
    head.know(tokens)
    begin_states(head.fc, head.midlayer.hidden_norm, [head.midlayer], target)
    begin_output(head, target, tokens)
    return head.to(target.device)
