"""DSpark (arXiv 2607.05147): a block whose places know the token before them, and how likely each one is accepted.

`MarkovHead` adds to a place's logits what the token before it says; `ConfidenceHead` gives the chance that what is
drawn there is accepted where all before it was.
"""

from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """B = W1 W2 of low rank r. What W2 reads is the token's row of W1 (vanilla), the same through a gate that sees the
    place's state, too (gated), or a state that goes on from place to place (rnn)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank, width, kind = config.markov_rank, config.hidden_size, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if kind == "rnn" else None

    def forward(self, e: Tensor, filled: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is added to a place's logits [B, K], and the state [B, r] of the next one.

        Args:
            e: [B, r] the row of W1 of the token before.
            filled: [B, H] the place's own state.
            state: what the place before gave; None for the first one.
        """
        if self.gate_proj is not None:
            e = torch.sigmoid(self.gate_proj(torch.cat([filled, e], -1))) * e
        if self.joint_proj is not None:
            state = torch.zeros_like(e) if state is None else state
            gate, new, e = self.joint_proj(torch.cat([state, e, filled], -1)).chunk(3, -1)
            gate, e = torch.sigmoid(gate), torch.tanh(e)
            state = gate * state + (1 - gate) * torch.tanh(new)
        return self.markov_w2(e), state


class ConfidenceHead(nn.Module):
    """A place's chance [B], of its state [B, H] and perhaps of W1's row [B, r]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.reads_token = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.reads_token else 0), 1)

    def forward(self, e: Tensor | None, filled: Tensor) -> Tensor:
        read = [filled, e] if self.reads_token and e is not None else [filled]
        return torch.sigmoid(self.proj(torch.cat(read, -1))[:, 0].float())
