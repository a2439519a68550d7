"""`BlockDiffusionModel`: a DFlash model with what others publish beside transformers' own."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from .dflash2_model import CandidateSelector, ConvolvedLayer
from .dspark_model import ConfidenceHead, MarkovHead
from .xpress_model import Refined, RefinerHead

State = Tensor | Refined | None


class Place(NamedTuple):
    """What is said of a place of the block once the token before it is drawn."""

    logits: Tensor
    """[B, K]"""
    said: Tensor | None
    """[B] how likely what is drawn from them is accepted, where the model has an idea of that"""
    state: State
    """for the next place"""


class BlockDiffusionModel(MuseGlimmerAssistantModel):
    """Of its config beside transformers': `vocab_size`, V, of the target; `draft_vocab_size`, K, tokens that the draft
    knows: where these are fewer it has a head of its own; DSpark's `markov_rank`, `markov_head_type`,
    `enable_confidence_head` and `confidence_head_with_markov`; DFlash 2's `conv_kernel_size`, `conv_group_size`,
    `selector_rank` and `selector_top_k`; and XPress' `xpress_rank` and `xpress_mlp_ratio`."""

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
        self.refiner_head = RefinerHead(config) if hasattr(config, "xpress_rank") else None
        self.confidence_head = ConfidenceHead(config) if getattr(config, "enable_confidence_head", False) else None

    @property
    def tokens(self) -> Tensor:
        """[K] the target's id of each token that the draft knows, where these are not all."""
        assert self.d2t is not None, "it has a vocabulary of its own"
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def independent(self) -> bool:
        """Whether a place says the same whatever was drawn before it."""
        return self.markov_head is None and self.candidate_selector is None and self.refiner_head is None

    @property
    def again(self) -> int:
        """Places of the text that are read anew for a block: XPress looks at the token before the last one."""
        return 0 if self.refiner_head is None or self.config.sample_from_anchor else 1

    def opened(self, filled: Tensor, before: Tensor) -> State:
        """What is known of a block before its first token is drawn.

        Args:
            filled: [B, L, H] its states.
            before: [B] the token before the last one of the text, at which it begins.
        """
        if self.refiner_head is None:
            return None
        state = self.refiner_head.opened(filled)
        return state if self.config.sample_from_anchor else self.refiner_head.read(state, before)

    def place(self, logits: Tensor, filled: Tensor, before: Tensor, state: Any) -> Place:
        """What is said of a place.

        Args:
            logits: [B, K] that it has by itself.
            filled: [B, H] its state.
            before: [B] the token before it.
            state: what the place before gave; for the first one, what the block was `opened` with.
        """
        e = None
        if self.refiner_head is not None:
            state = self.refiner_head.read(state, before)
            logits = logits + self.refiner_head(state)
        if self.candidate_selector is not None:
            logits = self.candidate_selector(logits, filled, before)
        if self.markov_head is not None:
            e = self.markov_head.markov_w1(before)
            more, state = self.markov_head(e, filled, state)
            logits = logits + more
        return Place(logits, None if self.confidence_head is None else self.confidence_head(e, filled), state)
