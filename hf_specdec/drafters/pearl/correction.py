"""After a rejection: a draw of the target's own token by what is known of q, which seldom needs a question."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...transfer import to_device, to_host
from ...verify.randomness import Purpose, Randomness
from ...verify.verification import residual
from .token import DraftToken

DRAWS = 256
"""tokens that a correction draws before it asks for the whole distribution"""

Question = Callable[[int, int, Tensor | None], Tensor | None]
"""(row of the call's batch, column, tokens) → q of these tokens (all where None); None where nobody can say any more"""


def corrected(
    p: Tensor, row: int, column: int, randomness: Randomness, rejected: DraftToken, question: Question
) -> Tensor | None:
    """All mass on a draw from norm(max(0, p − q)): y from p, taken with probability max(0, 1 − q(y)/p(y)).

    The first y to be taken counts. A question is asked only where the bounds of q(y) leave open whether it is taken.

    Args:
        p: [V] the target's distribution at the column.

    Returns:
        a distribution [V] to draw from; None where q is lost.
    """
    if not len(possible := p.gt(0).nonzero()):  # NaN: nothing can be drawn, whatever q is
        return p
    attempts = np.arange(1, 1 + DRAWS)  # 0 are the test itself and the draw of the target's own token
    u, v = (
        to_device(randomness.uniform([row], [column], purpose, attempts), p.device, torch.float64)
        for purpose in (Purpose.CHOOSE, Purpose.ACCEPT)
    )
    mass = p.double().cumsum(-1)
    y = torch.searchsorted(mass, u * mass[-1], right=True).clamp(max=int(possible[-1]))
    perhaps, surely = to_host(torch.stack([v * p[y] < p[y] - q.to(p) for q in rejected.bounds(y)]))
    if True in perhaps and not surely[perhaps.index(True)]:
        if (q := question(row, column, y)) is None:
            return None
        perhaps = to_host(v * p[y] < p[y] - q.to(p))
    if True in perhaps:
        return torch.nn.functional.one_hot(y[perhaps.index(True)], len(p)).to(p)
    q = question(row, column, None)
    return None if q is None else residual(p[None], q.to(p)[None])[0]
