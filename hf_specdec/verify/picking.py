"""`DraftPicker`: how every stochastic draft is drawn, so that q is what was sampled by construction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..transfer import moved
from .largest import argmax, topk
from .noise import Noise
from .processing import Processing
from .randomness import Purpose, Randomness
from .verification import distribution, draw, drawable


@dataclass
class DraftPicker:
    """The `Picker` of one call. It can be sent to another process."""

    processing: Processing
    vocab: int
    """of the target's logits"""
    do_sample: bool
    randomness: Randomness
    device: torch.device
    noise: Noise | None = None
    """of coupled sampling: the target's own"""

    def __call__(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] and q [B, target vocabulary] (None where tokens are not drawn), from a draft's logits [B, V]."""
        return self.pick(lengths, rows, self.scores(ids, lengths, rows, logits))

    def on(self, device: torch.device) -> "DraftPicker":
        """The same on another device."""
        if device == self.device:
            return self
        return replace(self, device=device, processing=self.processing.on(device))

    def scores(self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor) -> Tensor:
        """Processed scores [B, target vocabulary]; with the target's noise where sampling is coupled."""
        logits = moved(logits, self.device).float()
        if logits.shape[-1] > self.vocab:
            logits = logits[:, : self.vocab]
        elif logits.shape[-1] < self.vocab:
            logits = torch.nn.functional.pad(logits, (0, self.vocab - logits.shape[-1]), value=-torch.inf)
        scores = self.processing(ids, list(range(len(lengths))), lengths, logits)
        return scores if self.noise is None else scores + self.noise(rows, lengths, scores)

    def likeliest(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens [B, k] after the call's processors, and their chances [B, k]: point masses."""
        chances, tokens = topk(drawable(distribution(self.scores(ids, lengths, rows, logits))), min(count, self.vocab))
        return tokens, chances

    def pick(self, lengths: Sequence[int], rows: Sequence[int], scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] and, where they are drawn, q [B, target vocabulary]."""
        if not self.do_sample:
            return argmax(scores), None
        q = drawable(distribution(scores))
        u = self.randomness.tensor(rows, lengths, Purpose.DRAFT, q.device, attempt=self.randomness.round)
        return draw(q, u), q
