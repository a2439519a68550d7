"""`Likely`: what is known of q at a drafted place without a question to the worker."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...transfer import to_device

TOLD = 64
"""tokens whose q travels with a drafted token"""


class Likely(NamedTuple):
    """The likeliest tokens of q, in descending order. No other token has more than the last one has.

    So q is known as a whole where the last one has nothing, as behind `top_k` below 64.
    """

    tokens: Tensor
    """[..., K]"""
    q: Tensor
    """[..., K] float32"""

    def of(self, branch: int) -> "Likely":
        """Those of one branch, of a batch [L, K]."""
        return Likely(self.tokens[branch], self.q[branch])

    def on(self, device: torch.device) -> "Likely":
        """The same on a device, without waiting for it."""
        return Likely(to_device(self.tokens, device), to_device(self.q, device, torch.float32))

    def bounds(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Between what q of tokens y [N] lies, [N] each; the same twice where it is known. These are of one place."""
        same = y[:, None] == self.tokens
        known = (same * self.q).sum(-1)
        return known, torch.where(same.any(-1), known, self.q[-1])

    def fits(self, branches: int, vocab: int) -> bool:
        """Whether these can be of so many branches."""
        tokens, q = self
        in_range = ((tokens >= 0) & (tokens < vocab) & (q >= 0) & (q <= 1.0001)).all()
        return len(q) == branches and q.shape[1] > 0 and bool(in_range and (q[:, 1:] <= q[:, :-1]).all())
