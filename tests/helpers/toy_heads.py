"""Heads that are always right, always wrong, or right with a second choice, and that check what they are told: states
and tokens of each row. They show how little a head needs: what it reads, and how it draws."""

from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafters import DraftContext
from hf_specdec.drafters.heads import Head, HeadDrafter


class ToyHead(Head):
    """Its cache holds, in the place of keys, the tokens that were chosen behind each state."""

    def __init__(self, context: DraftContext, drafter: "ToyHeadDrafter") -> None:
        assert context.target is not None
        super().__init__(context, context.target, context.device, drafter.gamma)
        # What is read again is read as if drafted tokens had filled its slots.
        self.again, self.independent = drafter.again, drafter.independent
        self.drafter, self.vocab_size = drafter, context.vocab_size

    def draft(self, news: Any, cache: Any, most: int, draw: Any) -> None:
        width = news.tokens.shape[1]
        cache.reserve(width)
        for layer in cache.layers:
            held, _ = layer.update(news.tokens[:, None, :, None].float(), news.tokens[:, None, :, None].float())
        texts = []
        for b, n in enumerate(news.counts.tolist()):
            if b >= len(cache.lengths):  # a row that nobody has
                texts.append(texts[0])
                continue
            start = int(cache.lengths[b])
            texts.append(held[b, 0, : start + n, 0].long().tolist())
            whole = self.drafter.text_of(texts[b])[: start + n]  # the cache holds a row's text
            states = self.target(torch.tensor([whole]), output_hidden_states=True).hidden_states[-1]
            torch.testing.assert_close(news.states[b, :n], states[0, start:], rtol=1e-3, atol=1e-3)
        self.drafter.rows.append(len(texts))
        for i in range(most):
            draw(torch.stack([self.drafter.says(text, i, self.vocab_size) for text in texts]))


class ToyHeadDrafter(HeadDrafter):
    """See `ToyHead`."""

    def __init__(
        self,
        texts: list[list[int]],
        right: bool = True,
        gamma: int = 3,
        again: int = 0,
        doubts: bool = False,
        independent: bool = False,
    ) -> None:
        """
        Args:
            texts: prompts, and what plain decoding says behind them.
            doubts: at every other place of a text it is right with its second choice.
            independent: as of `Steps`.
        """
        super().__init__()
        self.known, self.right, self.gamma, self.again = texts, right, gamma, again
        self.doubts, self.independent = doubts, independent
        self.rows: list[int] = []
        """of each call of the heads"""

    def text_of(self, behind: list[int]) -> list[int]:
        """The text of which this was read, without its first token."""
        return next(text for text in self.known if text[1 : len(behind) + 1] == behind)

    def says(self, behind: list[int], i: int, vocab: int) -> Tensor:
        """Logits [V] i places behind what has been read."""
        text, place = self.text_of(behind), len(behind) + 1 + i
        token = text[place] if place < len(text) else 0
        other, logits = (token + 1) % vocab, torch.zeros(vocab)
        if self.doubts and place % 2:
            logits[other], logits[token] = 9.0, 8.5
        else:
            logits[token if self.right else other] = 9.0
        return logits

    def head(self, context: DraftContext) -> Head:
        return ToyHead(context, self)
