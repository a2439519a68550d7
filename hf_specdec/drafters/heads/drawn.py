"""`Drawn`: a draft that is drawn token by token."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...protocol import DraftContext, Sequences
from ..draft_model.model_draft import with_room, write_tokens

Draw = Callable[[Tensor], Tensor]
"""the next token [B] of each row, from logits [B, V]"""
Pick = Callable[[Tensor, int], tuple[Tensor, ...]]
"""tokens [B], and the q [B, V] that they were drawn from if they were, of logits [B, V] at the place i behind the
accepted tokens"""


class Drawn:
    """The tokens of a draft, each with its q, as they are drawn."""

    def __init__(self, pick: Pick) -> None:
        self.tokens: list[Tensor] = []
        """[B] each"""
        self._q: list[Tensor] = []
        self._pick = pick

    def draw(self, logits: Tensor) -> Tensor:
        """One more token [B], from logits [B, V]."""
        tokens, *q = self._pick(logits, len(self.tokens))
        self.tokens.append(tokens)
        self._q += q
        return tokens

    def all(self) -> tuple[Tensor, ...]:
        """Tokens [B, K], and q [B, K, V] where they are drawn at random."""
        return tuple(torch.stack(several, 1) for several in (self.tokens, self._q) if several)


def by_text(context: DraftContext, sequences: Sequences, most: int) -> Pick:
    """Through the call's processors, which may look at the text and what was drawn of it.

    Args:
        most: tokens that will be drawn per row, at most.
    """
    ids = with_room(sequences, most)

    def pick(logits: Tensor, i: int) -> tuple[Tensor, ...]:
        lengths = [n + i for n in sequences.lengths]
        tokens, q = context.pick(ids, lengths, sequences.rows, logits.to(context.device))
        write_tokens(ids, tokens, lengths)
        return (tokens,) if q is None else (tokens, q)

    return pick
