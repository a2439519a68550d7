"""A chi-square test by torch alone: the tests of distributions also run where scipy is missing, as on a lent GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


def chi_square(observed: Sequence[float] | Tensor, expected: Sequence[float] | Tensor) -> float:
    """The p-value of counts whose cells all expect something."""
    o, e = (torch.as_tensor(counts, dtype=torch.double) for counts in (observed, expected))
    if len(o) < 2:
        return 1.0  # one cell always holds all
    statistic, freedom = ((o - e) ** 2 / e).sum(), torch.tensor(len(o) - 1.0, dtype=torch.double)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
