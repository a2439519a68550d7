"""`BlockDiffusionModel`: a DFlash model with what others publish beside transformers' own."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from .dflash2_model import CandidateSelector, ConvolvedLayer
from .dspark_model import ConfidenceHead, MarkovHead


class Place(NamedTuple):
    """What is said of a place of the block once the token before it is drawn."""

    logits: Tensor
    """[B, K]"""
    said: Tensor | None
    """[B] how likely what is drawn from them is accepted, where the model has an idea of that"""
    state: Tensor | None
    """for the next place"""


class BlockDiffusionModel(MuseGlimmerAssistantModel):
    """Of its config beside transformers': `vocab_size`, V, of the target; `draft_vocab_size`, K, tokens that the draft
    knows: where these are fewer it has a head of its own; DSpark's `markov_rank`, `markov_head_type`,
    `enable_confidence_head` and `confidence_head_with_markov`; and DFlash 2's `conv_kernel_size`, `conv_group_size`,
    `selector_rank` and `selector_top_k`."""

    d2t: Tensor | None
    """[K] what is added to a draft token's id to get the target's"""

    def __init__(self, config: MuseGlimmerAssistantConfig) -> None:
        super().__init__(config)
        if second := hasattr(config, "selector_rank"):
            self.layers = nn.ModuleList(ConvolvedLayer(config, i) for i in range(config.num_hidden_layers))
        self.candidate_selector = CandidateSelector(config) if second else None
        known = config.draft_vocab_size if config.draft_vocab_size < config.vocab_size else None
        self.lm_head = None if known is None else nn.Linear(config.hidden_size, known, bias=False)
        self.register_buffer("d2t", None if known is None else torch.zeros(known, dtype=torch.long))
        self.markov_head = MarkovHead(config) if getattr(config, "markov_rank", 0) else None
        self.confidence_head = ConfidenceHead(config) if getattr(config, "enable_confidence_head", False) else None

    @property
    def tokens(self) -> Tensor:
        """[K] the target's id of each token that the draft knows, where these are not all."""
        assert self.d2t is not None, "it has a vocabulary of its own"
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def independent(self) -> bool:
        """Whether a place says the same whatever was drawn before it."""
        return self.markov_head is None and self.candidate_selector is None

    def place(self, logits: Tensor, filled: Tensor, before: Tensor, state: Tensor | None) -> Place:
        """What is said of a place.

        Args:
            logits: [B, K] that it has by itself.
            filled: [B, H] its state.
            before: [B] the token before it.
            state: what the place before gave; None for the first one.
        """
        e = None
        if self.candidate_selector is not None:
            logits = self.candidate_selector(logits, filled, before)
        if self.markov_head is not None:
            e = self.markov_head.markov_w1(before)
            more, state = self.markov_head(e, filled, state)
            logits = logits + more
        return Place(logits, None if self.confidence_head is None else self.confidence_head(e, filled), state)
