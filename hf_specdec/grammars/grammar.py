"""`Grammar`: a logits processor that holds each row of a call to a grammar, asked about many places at once."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..transfer import to_device

Text = tuple[int, list[int]]
"""A row of the call, and its tokens behind the prompt."""


class Matcher(Protocol):
    """Where a row stands in a grammar: what each library's own is asked for."""

    @property
    def ended(self) -> bool:
        """Whether the grammar's text is complete, and nothing but an end may follow."""

    def take(self, token: int) -> bool:
        """Go on behind a token; False where the grammar does not allow it, and nothing has changed."""

    def back(self, count: int) -> None:
        """Take back the last tokens."""

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may follow, one bit for each, into `mask` [words] int32, on the host."""

    def forced(self) -> int | None:
        """The token that is likely to follow because the grammar leaves no choice of text; None where it does."""

    def fork(self) -> "Matcher":
        """Another one that stands where this one does."""


class Path:
    """A matcher, and the text that it has taken since it stood at its grammar's beginning."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.text: list[int] = []

    def move(self, text: Sequence[int]) -> bool:
        """Stand behind a text; False where the grammar does not allow it, behind as much as it does allow."""
        same = min(len(self.text), len(text))
        while self.text[:same] != text[:same]:  # drafts differ in their last tokens
            same -= 1
        if same < len(self.text):
            self.matcher.back(len(self.text) - same)
            del self.text[same:]
        for token in text[same:]:
            if not self.matcher.take(token):
                return False
            self.text.append(token)
        return True


class Grammar:
    """A library's logits processor, whose matchers move along drafts and back. It makes them itself: its first call,
    behind the prompt, is plain decoding's. In the end they are where plain decoding leaves them."""

    def __init__(self, processor: Any, made: Callable[[Any], tuple[list[Matcher], int]], closed: bool) -> None:
        """
        Args:
            made: of a processor that was called its matchers [B], and the words of a mask.
            closed: whether it forbids tokens that its masks have no bit for.
        """
        self.processor, self.made, self.closed = processor, made, closed
        self.columns = self.words = 0
        """of the prompt, left padding included; and of a mask"""
        self.matchers: list[Matcher] = []
        """[B] of the processor, at their beginning"""
        self.paths: list[Path] = []
        """[B] of the judge"""

    def __call__(self, prompt: Tensor, texts: Sequence[Text], scores: Tensor) -> Tensor:
        """Scores [N, V] without what the grammar does not allow, in place.

        Args:
            prompt: [B, P] of the first call, which is behind all of them.
            texts: [N] what comes before the scores. Behind one that is not allowed any will do: nobody gets there.
        """
        if not self.paths:
            scores = self.processor(prompt, scores)
            self.columns, (self.matchers, self.words) = prompt.shape[1], self.made(self.processor)
            self.paths = [Path(matcher.fork()) for matcher in self.matchers]
            return scores
        masks = torch.zeros(len(texts), self.words, dtype=torch.int32, device="cpu")
        for n in sorted(range(len(texts)), key=texts.__getitem__):  # neighbours share most of their text
            row, text = texts[n]
            self.paths[row].move(text)
            self.paths[row].matcher.fill(masks[n])
        forbidden = np.unpackbits((~masks).numpy().view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        width = min(forbidden.shape[1], scores.shape[1])
        scores[:, :width].masked_fill_(to_device(forbidden[:, :width], scores.device, torch.bool), -torch.inf)
        if self.closed:
            scores[:, width:] = -torch.inf
        return scores

    def behind_prompt(self, tokens: Sequence[int], length: int) -> list[int]:
        """Of a row's tokens without left padding, of `length` columns with it, those that the grammar is about."""
        return list(tokens[len(tokens) - (length - self.columns) :]) if self.paths else []

    def follow(self, row: int, text: list[int]) -> None:
        """The row has come so far.

        Raises:
            ValueError: the grammar does not allow it: another processor has left it no token.
        """
        path = self.paths[row] if self.paths else None
        if path is not None and not path.move(text) and not path.matcher.ended:
            raise ValueError(
                f"{type(self.processor).__name__} does not allow token {text[len(path.text)]}, with which row {row} "
                "goes on: another processor, such as that of min_new_tokens, forbids all that it allows; leave that out"
            )

    def path_of(self, row: int) -> Path:
        """For a drafter: the row's beginning, in a matcher of its own."""
        return Path(self.matchers[row].fork())

    def finish(self, rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """The texts are complete: bring the processor's own matchers to their ends.

        Args:
            rows: [B] as of `behind_prompt`.
        """
        texts = [self.behind_prompt(*row) for row in rows]
        longest = max(map(len, texts))
        for matcher, text in zip(self.matchers, texts, strict=bool(self.matchers)):
            Path(matcher).move(text[:-1] if len(text) == longest else text)  # no call comes behind a last token
