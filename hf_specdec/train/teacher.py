"""What the target says, from its last states: of the tokens that a draft knows, or of all."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Teacher:
    """A target's output head. It is no module: nothing of it is trained or saved."""

    def __init__(self, target: PreTrainedModel, tokens: Tensor) -> None:
        """
        Args:
            tokens: [K] sorted, those that the draft knows.
        """
        self.head, self.rows = target.get_output_embeddings(), output_rows(target, tokens)
        self.tokens = tokens.to(self.rows.device)

    @torch.no_grad()
    def known(self, states: Tensor) -> Tensor:
        """[N, K] chances where the target may say nothing but known tokens, of its last states [N, H]."""
        return torch.nn.functional.linear(states, self.rows).float().softmax(-1)

    @torch.no_grad()
    def all(self, states: Tensor) -> Tensor:
        """[N, V] chances where it may say any token."""
        return self.head(states).float().softmax(-1)


def output_rows(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[K, H] of the target's output head."""
    weight: Tensor = target.get_output_embeddings().weight
    return weight.detach()[tokens.to(weight.device)]
