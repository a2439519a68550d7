"""DFlash 2: convolutions along the block around attention and MLP, and a selector that follows one path through the
likeliest tokens of its places. Names and shapes are those of the published weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

from .parts import over_vocabulary


class BlockConvolution(nn.Module):
    """The kernels of two causal convolutions, before a part of a layer and behind it. To what they are everywhere comes
    what the part's input says at each place, for groups of channels."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both kernels [B, L, taps, H] for an input [B, L, H]."""
        here = self.kernel_projection(x).repeat_interleave(self.group, -1)
        before, behind = (self.base_kernel + here.view(*x.shape[:2], *self.base_kernel.shape)).unbind(2)
        return before, behind


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """[B, L, H] of as many: each place by the first tap, the place before it by the second, and so on."""
    taps, length = kernel.shape[2], x.shape[1]
    shifted = torch.stack([pad(x, (0, 0, tap, 0))[:, :length] for tap in range(taps)], dim=2)
    return (shifted * kernel).sum(2)


class ConvolvedLayer(MuseGlimmerAssistantDecoderLayer):
    """A layer of a DFlash model with such convolutions."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        x = self.input_layernorm(hidden_states)
        before, behind = self.attention_conv(x)
        attended, _ = self.self_attn(hidden_states=convolved(x, before), **rest)
        a = hidden_states + convolved(attended, behind)
        x = self.post_attention_layernorm(a)
        before, behind = self.mlp_conv(x)
        return a + convolved(self.mlp(convolved(x, before)), behind)


class CandidateSelector(nn.Module):
    """Of a place's k likeliest tokens, how well each follows the token before it, given the place's state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vocab, rank, self.k = config.vocab_size, config.selector_rank, config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, filled: Tensor, before: Tensor) -> Tensor:
        """[B, V] logits, of which only those of the k likeliest tokens are left.

        Args:
            logits: [B, V] that the place has by itself.
            filled: [B, H] its state.
            before: [B] the token before it.
        """
        likeliest = logits.topk(self.k, dim=-1)
        context = self.predecessor_codebook[before] * self.hidden_projection(filled)
        more = (context[:, None] * self.successor_codebook[likeliest.indices]).sum(-1)
        return over_vocabulary(likeliest.values + more.to(logits), likeliest.indices, logits.shape[-1])
