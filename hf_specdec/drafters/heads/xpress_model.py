"""XPress: a refiner adds to a place's logits what the tokens before it in the block say, mixed by weights of their own
for every pair of places.

It is published with passes over the whole block, each of which goes on from the likeliest tokens of the one before.
What these come to is drawn here token by token, so that each has a distribution that it was drawn from.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class Refined(NamedTuple):
    """Of a block, until now."""

    hidden: Tensor
    """[B, L, 2 r] what its states say of each place, and of all together"""
    a: Tensor
    """[B, k, r] of the k places whose token before is known"""


class RefinerHead(nn.Module):
    """Names and shapes are those of the published weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank, width, length = config.xpress_rank, config.hidden_size, config.block_size
        inner = rank * config.xpress_mlp_ratio
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h, self.down_g = nn.Linear(width, rank, bias=False), nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, length, length))
        self.mlp_gate, self.mlp_up = nn.Linear(rank, inner, bias=False), nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab_size, bias=False)

    def opened(self, filled: Tensor) -> Refined:
        """A block of states [B, L, H] of which no place is refined."""
        together = filled.mean(dim=1, keepdim=True).expand_as(filled)
        hidden = torch.cat([self.down_h(filled), self.down_g(together)], dim=-1)
        return Refined(hidden, hidden[:, :0, : hidden.shape[-1] // 2])

    def read(self, state: Refined, before: Tensor) -> Refined:
        """One more place is known by the token before it [B]."""
        k = state.a.shape[1]
        a = self.in_proj(torch.cat([state.hidden[:, k], self.token_embed(before)], dim=-1))
        return state._replace(a=torch.cat([state.a, a[:, None]], dim=1))

    def forward(self, state: Refined) -> Tensor:
        """[B, K] what is added to the logits of the last of these places."""
        k = state.a.shape[1]
        x = state.a[:, -1] + torch.einsum("rj,bjr->br", self.mix_l[:, k - 1, :k], state.a)
        return self.readout(x + self.mlp_down(silu(self.mlp_gate(x)) * self.mlp_up(x)))  # type: ignore[no-any-return]
