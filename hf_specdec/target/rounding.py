"""Widths whose rows are rounded alike: then a token's logits do not depend on how many were verified with it.

A product's row depends on the others only through the kernel that their number selects. Which widths share one is not
documented anywhere: it is tried, bit for bit, on the model itself.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

TRIED = (1, 2, 4, 8, 16, 32)
"""widths"""
TEXT = 2 * TRIED[-1]
"""tokens that are fed in pieces"""

Feed = Callable[[Tensor, int, int], Tensor]
"""logits [B, width, V] behind tokens [B, width] that stand from a place on, fed at a width"""


def widths_alike(feed: Feed, rows: int, vocab: int, device: torch.device) -> tuple[int, ...]:
    """The largest set of widths that give the same bits, and do so wherever a token stands among the others. Empty
    where no width does.

    Args:
        feed: of the model; what is behind a place may be written over.
    """
    ids = (torch.arange(rows * TEXT, device=device).view(rows, TEXT) * 7919 + 13) % vocab
    found: dict[int, Tensor] = {}
    for width in TRIED:
        whole = _fed(feed, ids, width, [width] * (TEXT // width))
        if torch.equal(whole, _fed(feed, ids, width, _unevenly(width))):
            found[width] = whole
    classes = [[w for w in found if torch.equal(found[w], whole)] for whole in found.values()]
    classes.sort(key=lambda alike: (-len(alike), alike))
    return tuple(classes[0]) if classes else ()


def _fed(feed: Feed, ids: Tensor, width: int, steps: Sequence[int]) -> Tensor:
    """Logits [B, TEXT, V], of a text that goes on by so many tokens with each forward. Forwards are equally wide: what
    is fed beyond a step is wrong, and fed again."""
    logits = []
    for end, step in zip(accumulate(steps), steps, strict=True):
        fed = torch.nn.functional.pad(ids[:, end - step : end], (0, width - step), value=1)
        logits.append(feed(fed, end - step, width)[:, :step])
    return torch.cat(logits, dim=1)


def _unevenly(width: int) -> list[int]:
    """Steps up to the width that come to `TEXT` tokens."""
    steps: list[int] = []
    while (left := TEXT - sum(steps)) > 0:
        steps.append(min(left, 1 + len(steps) * 5 % width))
    return steps
