"""`DraftPicker`: how every stochastic draft is drawn, so that q is what was sampled by construction."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..transfer import moved
from .largest import argmax, topk
from .noise import Noise
from .processing import FREE, Processing
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
        scores = self.processing(ids, list(range(len(lengths))), lengths, self._known(logits))
        return scores if self.noise is None else scores + self.noise(rows, lengths, scores)

    def _known(self, logits: Tensor) -> Tensor:
        """[B, target vocabulary] of a draft's logits; what it does not have cannot be."""
        logits = moved(logits, self.device).float()
        missing = self.vocab - logits.shape[-1]
        return (
            logits[:, : self.vocab] if missing <= 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        )

    def likeliest(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens [B, k] after the call's processors, and their chances [B, k]: point masses."""
        return self._likeliest(self.scores(ids, lengths, rows, logits), count)

    def _likeliest(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        chances, tokens = topk(drawable(distribution(scores)), min(count, self.vocab))
        return tokens, chances

    def pick(self, lengths: Sequence[int], rows: Sequence[int], scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] and, where they are drawn, q [B, target vocabulary]."""
        return self._picked(scores, self.numbers(lengths, rows, scores.device) if self.do_sample else None)

    def _picked(self, scores: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if u is None:
            return argmax(scores), None
        q = drawable(distribution(scores))
        return draw(q, u), q

    def numbers(self, lengths: Sequence[int], rows: Sequence[int], device: torch.device, ahead: int = 0) -> Tensor:
        """The random numbers [B] that draws behind `lengths` columns go by.

        Args:
            ahead: rounds until those draws are verified.
        """
        return self.randomness.tensor(rows, lengths, Purpose.DRAFT, device, attempt=self.randomness.round + ahead)

    # ------------------------------------------------------------------ picks that can be recorded

    @property
    def recordable(self) -> Hashable | None:
        """What picks depend on beside logits and random numbers, if that is settings only; None if they look at the
        text, or at noise that the host makes."""
        settings = [(type(p).__name__, *sorted(vars(p).items())) for p in self.processing.processors]
        free = all(type(p) in FREE for p in self.processing.processors)
        plain = all(isinstance(value, (bool, int, float)) for _, *several in settings for _, value in several)
        if self.noise is not None or self.processing.opaque or not (free and plain):
            return None
        return self.do_sample, self.vocab, self.device, tuple(settings)

    def from_logits(self, logits: Tensor, u: Tensor | None, count: int | None) -> tuple[Tensor, ...]:
        """Where picks are `recordable`: tokens [B], and q where they are drawn with numbers u [B]; or, where a count is
        given, so many tokens [B, k] and their chances."""
        scores = self._known(logits)
        for processor in self.processing.processors:
            scores = processor(None, scores)
        if count is not None:
            return self._likeliest(scores, count)
        tokens, q = self._picked(scores, u)
        return (tokens,) if q is None else (tokens, q)
