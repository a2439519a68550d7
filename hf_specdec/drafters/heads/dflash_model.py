"""`BlockDiffusionModel`: a DFlash model with what others publish beside transformers' own."""

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel


class BlockDiffusionModel(MuseGlimmerAssistantModel):
    """Of its config beside transformers': `vocab_size`, V, of the target; and `draft_vocab_size`, K, tokens that the
    draft knows. Where these are fewer it has a head of its own."""

    d2t: Tensor | None
    """[K] what is added to a draft token's id to get the target's"""

    def __init__(self, config: MuseGlimmerAssistantConfig) -> None:
        super().__init__(config)
        known = config.draft_vocab_size if config.draft_vocab_size < config.vocab_size else None
        self.lm_head = None if known is None else nn.Linear(config.hidden_size, known, bias=False)
        self.register_buffer("d2t", None if known is None else torch.zeros(known, dtype=torch.long))

    @property
    def tokens(self) -> Tensor:
        """[K] the target's id of each token that the draft knows, where these are not all."""
        assert self.d2t is not None, "it has a vocabulary of its own"
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
