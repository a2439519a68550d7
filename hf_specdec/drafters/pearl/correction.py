"""After a rejection: a draw of the target's own token that asks the worker for q of a few tokens only."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...transfer import to_device
from ...verify.randomness import Purpose, Randomness
from ...verify.verification import residual

DRAWS = (16, 64, 256)
"""sizes of the batches of draws that a correction asks about, before it asks for the whole distribution"""

Question = Callable[[int, int, Tensor | None], Tensor | None]
"""(row of the call's batch, column, tokens) → q of these tokens (all where None); None where nobody can say any more"""


def corrected(p: Tensor, row: int, column: int, randomness: Randomness, question: Question) -> Tensor | None:
    """All mass on a draw from norm(max(0, p − q)): y from p, taken with probability max(0, 1 − q(y)/p(y)).

    Args:
        p: [V] the target's distribution at the column.

    Returns:
        a distribution [V] to draw from; None where q is lost.
    """
    mass = p.double().cumsum(-1)
    if not len(possible := p.gt(0).nonzero()):  # NaN: nothing can be drawn, whatever q is
        return p
    last = int(possible[-1])
    attempt = 1  # 0 are the test itself and the draw of the target's own token
    for size in DRAWS:
        attempts = np.arange(attempt, attempt + size)
        u, v = (
            to_device(randomness.uniform([row], [column], purpose, attempts), p.device, torch.float64)
            for purpose in (Purpose.CHOOSE, Purpose.ACCEPT)
        )
        y = torch.searchsorted(mass, u * mass[-1], right=True).clamp(max=last)
        q = question(row, column, y)
        if q is None:
            return None
        taken = v * p[y] < p[y] - q.to(p)
        if taken.any():
            return torch.nn.functional.one_hot(y[taken.int().argmax()], len(p)).to(p)
        attempt += size
    q = question(row, column, None)
    return None if q is None else residual(p[None], q.to(p)[None])[0]
