"""`CutLlamaForCausalLM`: a small Llama that knows the tokens its target writes most, and reads any other as a near one.

Embedding and head of a large vocabulary are most of a small model's weight, and of its time. A draft need not know
every token: what it cannot draft the target writes. `hf-specdec train draft` makes such models.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ...errors import SpeculationError
from ...target.inputs import CACHE


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
        inner = copy.deepcopy(config)  # its attention is the one that was asked for
        inner.vocab_size, inner.pad_token_id = config.known_tokens, None
        self.model = LlamaModel(inner)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.known_tokens, bias=False)
        self.register_buffer("row_of", torch.arange(config.vocab_size) % config.known_tokens)
        self.register_buffer("token_of", torch.arange(config.known_tokens))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As of every model; tables that do not fit its sizes are refused.

        Raises:
            SpeculationError: a row or token out of range.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, end in (("row_of", model.config.known_tokens), ("token_of", model.vocab_size)):
            table = getattr(model, name)
            if not table.is_meta and not bool(((table >= 0) & (table < end)).all()):
                raise SpeculationError(f"{name} of a cut draft must hold numbers from 0 to {end - 1}; train it again")
        return loaded

    def hidden(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """The inner model's outputs for the target's ids [B, T]."""
        return self.model(input_ids=None if input_ids is None else self.row_of[input_ids], **kwargs)

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T or logits_to_keep, vocab_size] for the target's ids [B, T].

        Args:
            labels: [B, T] the target's ids, for a loss over the known tokens; -100, as any token that is not known, is
                left out of it.
            position_ids: [B, T] named, as models that take them for rows of different lengths do.
        """
        outputs = self.hidden(input_ids, position_ids=position_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        known = self.lm_head(outputs.last_hidden_state[:, keep])
        logits = known.new_full((*known.shape[:-1], self.vocab_size), torch.finfo(known.dtype).min)
        logits[..., self.token_of] = known
        loss = None
        if labels is not None:
            rows = self.row_of[labels.clamp_min(0)]
            rows = rows.where(self.token_of[rows] == labels, -100)
            loss = self.loss_function(logits=known, labels=rows, vocab_size=self.config.known_tokens, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )

    def plain(self) -> LlamaForCausalLM:
        """The same draft as a Llama that any program loads: each token with rows of its own.

        Logits of known tokens are the same. A token that is not known has, at every position, the mean of theirs: it is
        never the largest, whatever the hidden state. (A Llama's head has no bias, so that a row alone cannot be low
        everywhere.)
        """
        ours = ("known_tokens", "model_type", "architectures", "dtype")
        options = {name: value for name, value in self.config.to_dict().items() if name not in ours}
        config = LlamaConfig(**options | {"tie_word_embeddings": False, "use_cache": True})
        known = self.lm_head.weight.detach()
        plain = AutoModelForCausalLM.from_config(config, dtype=known.dtype)
        head = known.float().mean(0).to(known.dtype).repeat(self.vocab_size, 1)
        head[self.token_of] = known
        weights = {name: value for name, value in self.state_dict().items() if name not in ("row_of", "token_of")}
        weights["model.embed_tokens.weight"] = self.model.embed_tokens.weight.detach()[self.row_of]
        weights["lm_head.weight"] = head
        plain.to(known.device).load_state_dict(weights)
        plain.generation_config = copy.deepcopy(self.generation_config)
        return plain.eval()


AutoConfig.register(CutLlamaConfig.model_type, CutLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(CutLlamaConfig, CutLlamaForCausalLM, exist_ok=True)
