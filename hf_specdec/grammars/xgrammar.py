"""xgrammar: its processor and its matchers, of version 0.2 on."""

import sys
from typing import Any

import torch
from torch import Tensor

from .grammar import Grammar, Matcher

FEW = 16
"""words of a mask that allow something, beyond which there is a choice of text"""


def grammar(processor: Any) -> Grammar | None:
    """Of `xgrammar.contrib.hf.LogitsProcessor`."""
    return _read(processor, not processor.prefilled, "matchers", "token_bitmask")


def in_outlines(processor: Any) -> Grammar | None:
    """Of `outlines.backends.xgrammar.XGrammarLogitsProcessor`."""
    return _read(processor, processor.is_first_token, "_matchers", "_bitmask")


def _read(processor: Any, new: bool, matchers: str, masks: str) -> Grammar | None:
    if not new or not hasattr(sys.modules["xgrammar"].GrammarMatcher, "fork"):
        return None

    def made(called: Any) -> tuple[list[Matcher], int]:
        words, known = getattr(called, masks).shape[1], dict[str, int | None]()
        return [XGrammar(matcher, words, known) for matcher in getattr(called, matchers)], words

    return Grammar(processor, made, closed=False)


class XGrammar:
    """A `GrammarMatcher`."""

    def __init__(self, matcher: Any, words: int, known: dict[str, int | None]) -> None:
        """
        Args:
            known: of texts that were forced before the first token, for all rows.
        """
        self.matcher, self.words, self.known = matcher, words, known

    @property
    def ended(self) -> bool:
        return self.matcher.is_terminated()

    def take(self, token: int) -> bool:
        return not self.ended and self.matcher.accept_token(token)

    def back(self, count: int) -> None:
        self.matcher.rollback(count)

    def fill(self, mask: Tensor) -> None:
        if not self.ended:
            self.matcher.fill_next_token_bitmask(mask[None])
            return
        self.back(1)  # behind its end a row keeps its last mask
        self.fill(mask)
        self.take(self.matcher.stop_token_ids[0])

    def forced(self) -> int | None:
        if self.ended:
            return None
        if self.matcher.is_completed():
            allowed, ends = self._allowed(), self.matcher.stop_token_ids
            return allowed[0] if allowed and set(allowed) <= set(ends) else None
        text = self.matcher.find_jump_forward_string()
        if text not in self.known:
            self.known[text] = self._longest(text) if text else None
        return self.known[text]

    def _longest(self, text: str) -> int | None:
        """The longest token that a forced text begins with, but none that ends it: that may go on with what follows."""
        best, rest = None, text
        for token in self._allowed():
            self.take(token)
            left = self.matcher.find_jump_forward_string()
            self.back(1)
            if left and len(left) < len(rest) and text.endswith(left):
                best, rest = token, left
        return best

    def _allowed(self) -> list[int]:
        """What may follow, where that is little."""
        self.fill(mask := torch.zeros(self.words, dtype=torch.int32, device="cpu"))
        words = mask.nonzero()[:, 0].tolist()
        if len(words) > FEW:
            return []
        return [32 * word + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]

    def fork(self) -> Matcher:
        return XGrammar(self.matcher.fork(), self.words, self.known)
