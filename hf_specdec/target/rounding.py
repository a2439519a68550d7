"""Widths whose rows are rounded alike: then a token's logits depend neither on how many were verified with it, nor on
the row that it is in, nor on what other rows hold, nor on other branches of a tree.

A product's row depends on the others only through the kernel that their number selects. Which widths share one is not
documented anywhere: it is tried, bit for bit, on the model itself.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .near import NEAR

TRIED = (1, 2, 4, 8, 16, NEAR)
"""widths"""
TEXT = 2 * TRIED[-1]
"""tokens that are fed in pieces"""

Feed = Callable[[Tensor, int, int], Tensor]
"""logits [B, width, V] behind tokens [B, width] that stand from a place on, fed at a width"""


def widths_alike(
    feed: Feed, rows: int, vocab: int, device: torch.device, branch: Feed | None = None
) -> tuple[int, ...]:
    """The largest set of widths that give the same bits, and do so wherever a token stands among the others, in
    whichever row, beside whatever texts. Empty where no width does.

    Args:
        feed: of the model; what is behind a place may be written over.
        branch: the same of tokens [B, up to width / 2] as one branch of a tree. None where there are none.
    """
    ids = (torch.arange(rows * TEXT, device=device).view(rows, TEXT) * 7919 + 13) % vocab
    classes: list[tuple[Tensor, list[int]]] = []
    for width in TRIED:
        evenly = [width] * (TEXT // width)
        whole = _fed(feed, ids, width, evenly)
        moved = _fed(feed, ids.roll(1, 0), width, _unevenly(width)).roll(-1, 0)
        if not torch.equal(whole, moved):
            continue
        if branch is not None and width > 2 and not torch.equal(whole, _branched(branch, ids, width)):
            continue
        if rows > 1:  # the first text, beside its likes in place of the others
            repeated = _fed(feed, ids[:1].expand(rows, -1), width, evenly)
            if not torch.equal(repeated, whole[:1].expand_as(repeated)):
                continue
        for logits, alike in classes:
            if torch.equal(logits, whole):
                alike.append(width)
                break
        else:
            classes.append((whole, [width]))
    return tuple(max(classes, key=lambda found: len(found[1]))[1]) if classes else ()


def _fed(feed: Feed, ids: Tensor, width: int, steps: Sequence[int]) -> Tensor:
    """Logits [B, TEXT, V], of a text that goes on by so many tokens with each forward. Forwards are equally wide: what
    is fed beyond a step is wrong, and fed again."""
    logits = []
    for end, step in zip(accumulate(steps), steps, strict=True):
        fed = torch.nn.functional.pad(ids[:, end - step : end], (0, width - step), value=1)
        logits.append(feed(fed, end - step, width)[:, :step])
    return torch.cat(logits, dim=1)


def _branched(branch: Feed, ids: Tensor, width: int) -> Tensor:
    """The same, by trees."""
    starts = range(0, TEXT, width // 2)
    return torch.cat([branch(ids[:, start : start + width // 2], start, width) for start in starts], dim=1)


def _unevenly(width: int) -> list[int]:
    """Steps up to the width that come to `TEXT` tokens."""
    steps: list[int] = []
    while (left := TEXT - sum(steps)) > 0:
        steps.append(min(left, 1 + len(steps) * 5 % width))
    return steps
