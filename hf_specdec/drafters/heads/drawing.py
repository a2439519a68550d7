"""`Drawn`: tokens that are drawn one behind the other from given logits."""

import torch
from torch import Tensor

from ...protocol import Draft, DraftContext, Sequences
from ..draft_model.model_draft import with_room, write_tokens


class Drawn:
    """A draft in the making: every token through the call's processors, with what it was drawn from."""

    def __init__(self, context: DraftContext, sequences: Sequences, budget: list[int], most: int) -> None:
        """
        Args:
            most: tokens that are going to be drawn per row.
        """
        self.context, self.sequences, self.budget = context, sequences, budget
        self.tokens: list[Tensor] = []
        """[B] each"""
        self._q: list[Tensor] = []
        self._ids = with_room(sequences, most)

    def draw(self, logits: Tensor) -> None:
        """One more token per row, from logits [B, V]."""
        lengths = [n + len(self.tokens) for n in self.sequences.lengths]
        tokens, q = self.context.pick(self._ids, lengths, self.sequences.rows, logits.to(self.context.device))
        write_tokens(self._ids, tokens, lengths)
        self.tokens.append(tokens)
        if q is not None:
            self._q.append(q)

    def draft(self) -> Draft:
        """What was drawn, as far as each row has room for it."""
        lengths = [min(len(self.tokens), room) for room in self.budget]
        return Draft(torch.stack(self.tokens, 1), lengths, q=torch.stack(self._q, 1) if self._q else None)
