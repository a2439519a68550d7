"""llguidance's matchers, in outlines' processor."""

from typing import Any

from torch import Tensor

from .grammar import Grammar, Matcher


def grammar(processor: Any) -> Grammar | None:
    """Of `outlines.backends.llguidance.LLGuidanceLogitsProcessor`."""
    return Grammar(processor, _matchers, closed=True) if processor.is_first_token else None


def _matchers(processor: Any) -> tuple[list[Matcher], int]:
    ends = list(processor.llg_tokenizer.eos_tokens)
    return [LLGuidance(matcher, ends) for matcher in processor.ll_matchers], processor.bitmask.shape[1]


class LLGuidance:
    """An `LLMatcher`."""

    def __init__(self, matcher: Any, ends: list[int], closed: bool = False) -> None:
        """
        Args:
            ends: tokens that end a text.
            closed: whether one was taken behind a text that nothing else may follow, where the matcher counts none.
        """
        self.matcher, self.ends, self.closed = matcher, ends, closed

    @property
    def ended(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def _awaits_end(self) -> bool:
        return self.matcher.stop_reason() == "NoExtension" and not self.closed

    def take(self, token: int) -> bool:
        if self.ended:
            fits = self._awaits_end and token in self.ends
            self.closed |= fits
            return fits
        return self.matcher.validate_tokens([token]) == 1 and self.matcher.consume_token(token)

    def back(self, count: int) -> None:
        if count:
            self.matcher.rollback(count - self.closed)
            self.closed = False

    def fill(self, mask: Tensor) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())

    def forced(self) -> int | None:
        if self.ended:
            return self.ends[0] if self._awaits_end else None
        return next(iter(self.matcher.compute_ff_tokens()), None)

    def fork(self) -> Matcher:
        return LLGuidance(self.matcher.deep_copy(), self.ends, self.closed)
