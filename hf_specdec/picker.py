"""What a session may ask of its call: to draw a token, and which ones are ruled out."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Picker(Protocol):
    """Applies the call's processors and picks a token: how every stochastic draft is drawn."""

    def __call__(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            ids: [B, capacity] accepted and drafted tokens so far.
            lengths: columns of `ids` that count, per row.
            rows: each row's index in the call's batch.
            logits: [B, any vocabulary] raw logits of the draft; cut or padded to the target's vocabulary.

        Returns:
            tokens [B], and q [B, target vocabulary] in float32, what they were drawn from; None when greedy.
            Processors of the user's own are left out of q (a second call of theirs could change what they do).
        """

    def likeliest(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Without a draw: the likeliest tokens [B, k], k at most `count`, and their chances [B, k] after the call's
        processors; 0 for what these forbid. Arguments as above."""

    def on(self, device: torch.device) -> "Picker":
        """The same on another device, for drafts that are drawn there."""


class Forbids(Protocol):
    """Tells the tokens that the call's processors give no chance, whatever the target's scores."""

    def __call__(self, ids: Tensor, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """
        Args:
            ids: [R, capacity] accepted and drafted tokens.
            rows: [N] the row of `ids` that each token would continue.
            lengths: [N] columns of it that come before the token.
            tokens: [N] ids below the target's vocabulary.

        Returns:
            whether each is forbidden. Processors of the user's own are not asked (a second call of theirs could change
            what they do).
        """
