"""`LlamaForCausalLMEagle3`: the head, one layer of a Llama or Qwen3 that reads the target's states beside tokens.

Letters are the paper's (Section 3.1): g is what `fc` makes of the target's states at a place, e the embedding of the
token behind it, a what the layer makes of both. In the place of g, which nobody knows behind drafted tokens, the layer
reads its own a.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from ...target.inputs import CACHE

FUSED = 3
"""states of the target that are read at each place"""
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[nn.Module], type[nn.Module]]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}
"""whose layers heads are made of, by `model_type`"""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Masks = Tensor | dict[str, Tensor]


class LlamaForCausalLMEagle3(PreTrainedModel):
    """The class and its weights are named as in the files that SGLang and vLLM load.

    Of its config beside a Llama's: `draft_vocab_size`, K; `target_hidden_size`, where that is not the head's own;
    `eagle_aux_hidden_state_layer_ids`, which hidden states are read (0 are the embeddings); `norm_before_residual`,
    whether what is added to the first layer's attention is normed, too; and EAGLE-3.1's norms: `fc_norm` of each state
    that is read, or `norm_before_fc` of all together, and `norm_output`, which says that a is passed on as normed. One
    with a `mask_token_id` is P-EAGLE's, and has a state that stands for those of places that nobody knows yet.
    """

    config_class = LlamaConfig
    config: Any
    _supports_sdpa = True
    d2t: Tensor
    """[K] what is added to a draft token's id to get the target's"""
    t2d: Tensor
    """[V] whether the draft knows a token of the target; for other programs"""

    def __init__(self, config: PreTrainedConfig, embeds: bool = False) -> None:
        """
        Args:
            embeds: whether it has embeddings of its own; else the target's are read.
        """
        super().__init__(config)
        _, layer_class, rotary_class = FAMILIES[config.model_type]
        size, vocab = config.hidden_size, config.vocab_size
        read, known = self.of_config("target_hidden_size", size), self.of_config("draft_vocab_size", vocab)
        self.embed_tokens = nn.Embedding(vocab, size) if embeds else None
        self.midlayer = reading_two(layer_class(config, 0))
        self.layers = nn.ModuleDict({str(i): layer_class(config, i) for i in range(1, config.num_hidden_layers)})
        self.fc = nn.Linear(FUSED * read, size, bias=False)
        self.norm = self._norm(size)
        self.input_norm = self._norm(FUSED * read) if self.of_config("norm_before_fc", False) else None
        self.fc_norm = nn.ModuleList(self._norm(read) for _ in range(FUSED if self.of_config("fc_norm", False) else 0))
        self.lm_head = nn.Linear(size, known, bias=False)
        self.rotary_emb = rotary_class(config)
        self.mask_token: int | None = self.of_config("mask_token_id", None)
        self.mask_hidden = None if self.mask_token is None else nn.Parameter(torch.zeros(1, 1, FUSED * read))
        self.register_buffer("d2t", torch.zeros(known, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(vocab, dtype=torch.bool))

    def of_config(self, name: str, default: Any) -> Any:
        """What the config says, where it does."""
        found = getattr(self.config, name, None)
        return default if found is None else found

    def _norm(self, size: int) -> nn.Module:
        return type(self.midlayer.input_layernorm)(size, eps=self.config.rms_norm_eps)

    @property
    def tokens(self) -> Tensor:
        """[K] the target's id of each token that the draft knows."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def know(self, tokens: Tensor) -> None:
        """Let its vocabulary be these tokens [K] of the target, which are sorted."""
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    def states_read(self, count: int) -> list[int]:
        """Which hidden states of a target of `count` layers are read, 0 the embeddings."""
        return list(self.of_config(LAYER_IDS, usual_states(count)))

    def fused(self, states: Tensor) -> Tensor:
        """g [..., H] of the target's states [..., 3 H_target], side by side."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = zip(self.fc_norm, states.chunk(FUSED, dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(states)

    def forward(self, g: Tensor, e: Tensor, positions: Tensor, masks: Masks, cache: Any) -> tuple[Tensor, Tensor]:
        """One step: what the layer passes on to the next place, a, and what logits are made of, both [B, T, H].

        Args:
            g: [B, T, H] of the target's states, or what an earlier step has passed on.
            e: [B, T, H] embeddings of the tokens behind these places.
            positions: [B, T] of the places.
            masks: additive, [1 or B, 1, T, S]; by the kind of layer, where there are several.
            cache: of keys and values.
        """
        rest = {"position_embeddings": self.rotary_emb(g, position_ids=positions), CACHE: cache}
        a = self._first_layer(g, e, attention_mask=self._mask(masks, 0), **rest)
        for i, layer in enumerate(self.layers.values(), 1):
            a = layer(a, attention_mask=self._mask(masks, i), position_ids=positions, **rest)
        normed = self.norm(a)
        return normed if self.of_config("norm_output", False) else a, normed

    def _mask(self, masks: Masks, layer: int) -> Tensor:
        if isinstance(masks, Tensor):
            return masks
        return masks[self.config.layer_types[layer]] if len(masks) > 1 else next(iter(masks.values()))

    def _first_layer(self, g: Tensor, e: Tensor, **rest: Any) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(g)
        attended, _ = layer.self_attn(torch.cat([layer.input_layernorm(e), normed], dim=-1), **rest)
        a = (normed if self.of_config("norm_before_residual", False) else g) + attended
        return a + layer.mlp(layer.post_attention_layernorm(a))


def usual_states(count: int) -> list[int]:
    """Those that are read of a target of `count` layers where nothing else is said: 2, the middle, and the third from
    above."""
    return [2, count // 2, count - 3]


def reading_two(layer: Any) -> Any:
    """A decoder layer whose attention reads two vectors [..., 2 H] side by side, and that has a norm for the second."""
    for name in ("q_proj", "k_proj", "v_proj"):
        narrow = getattr(layer.self_attn, name)
        wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
        setattr(layer.self_attn, name, wide)
    first = layer.input_layernorm
    layer.hidden_norm = type(first)(len(first.weight), eps=first.variance_epsilon)
    return layer
