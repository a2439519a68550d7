"""`CutLlamaForCausalLM`: a small Llama that knows the tokens its target writes most, and reads any other as a near one.

Embedding and head of a large vocabulary are most of a small model's weight, and of its time. A draft need not know
every token: what it cannot draft the target writes. `hf-specdec train draft` makes such models.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class CutLlamaConfig(LlamaConfig):
    """A Llama's config; `vocab_size` is the target's, `known_tokens` the number of tokens with a row of their own."""

    model_type = "cut_llama"
    known_tokens: int = 8192


class CutLlamaForCausalLM(LlamaForCausalLM):
    """Takes and gives the target's token ids. Tokens that it does not know have the lowest logit there is."""

    config_class = CutLlamaConfig
    config: CutLlamaConfig
    row_of: Tensor
    """[vocab_size] the embedding row that a token is read by"""
    token_of: Tensor
    """[known_tokens] the token that a row of the head stands for"""

    def __init__(self, config: CutLlamaConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        inner = LlamaConfig.from_dict(config.to_dict() | {"vocab_size": config.known_tokens, "pad_token_id": None})
        self.model = LlamaModel(inner)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.known_tokens, bias=False)
        self.register_buffer("row_of", torch.arange(config.vocab_size) % config.known_tokens)
        self.register_buffer("token_of", torch.arange(config.known_tokens))
        self.post_init()

    def hidden(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The inner model's outputs for the target's ids [B, T]."""
        return self.model(input_ids=self.row_of[input_ids], **kwargs)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits [B, T or logits_to_keep, vocab_size] for the target's ids [B, T]."""
        kwargs.pop("labels", None)
        outputs = self.hidden(input_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        known = self.lm_head(outputs.last_hidden_state[:, keep])
        logits = known.new_full((*known.shape[:-1], self.vocab_size), torch.finfo(known.dtype).min)
        logits[..., self.token_of] = known
        return CausalLMOutputWithPast(
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


AutoConfig.register(CutLlamaConfig.model_type, CutLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(CutLlamaConfig, CutLlamaForCausalLM, exist_ok=True)
