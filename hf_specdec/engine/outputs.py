"""What a call returns beside its tokens: per-step outputs shaped as plain decoding shapes them."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..protocol import Forward


class StepOutputs:
    """`scores`, `logits`, `hidden_states` and `attentions`, one entry per token, taken out of block forwards."""

    def __init__(self, config: GenerationConfig) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.windows: list[int | None] = []
        """sliding windows of the cache's layers"""

        def collect(flag: bool | None) -> tuple[Any, ...] | None:
            return () if wanted and flag else None

        self.scores: tuple[Any, ...] | None = collect(config.output_scores)
        self.logits: tuple[Any, ...] | None = collect(config.output_logits)
        self.hidden_states: tuple[Any, ...] | None = collect(config.output_hidden_states)
        self.attentions: tuple[Any, ...] | None = collect(config.output_attentions)

    @staticmethod
    def wanted(config: GenerationConfig) -> bool:
        """Whether the caller asked for any of them."""
        asked = (config.output_scores, config.output_logits, config.output_hidden_states, config.output_attentions)
        return bool(config.return_dict_in_generate and any(asked))

    def add(self, i: int, forward: Forward, scores: Tensor | None, is_prefill: bool) -> None:
        """Take position i, with its processed scores [B, V], out of a forward; a prefill's states are kept whole."""
        logits, outputs = forward.logits, forward.outputs
        if self.scores is not None:
            assert scores is not None, "they are wanted"
            self.scores += (scores.clone(),)  # a view would keep the whole block alive
        if self.logits is not None:
            self.logits += (logits[:, i].to(torch.float32, copy=True),)
        if self.hidden_states is not None:
            states = outputs.hidden_states
            self.hidden_states += (states if is_prefill else tuple(layer[:, i : i + 1] for layer in states),)
        if self.attentions is not None:
            later = logits.shape[1] - 1 - i  # columns that position i does not see yet
            windows = self.windows or [None] * len(outputs.attentions)
            step = []
            for layer, window in zip(outputs.attentions, windows, strict=False):
                end = layer.shape[-1] - later
                step.append(layer[:, :, i : i + 1, max(0, end - window) if window else 0 : end])
            self.attentions += (outputs.attentions if is_prefill else tuple(step),)
