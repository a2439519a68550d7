"""What a drafter hands over is checked for its form before anything is done with it: forwards, corrections, and drafts
(`fitting`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import shown
from ..protocol import Forward

MOST_SUCCESSORS = 64
"""of the target's likeliest tokens that verdicts carry for each place: so many ids are read in every round"""


class Unfit(ValueError):
    """Something that a drafter gave is not what was asked for."""


def expect(fine: bool, name: str, allowed: str, got: object) -> None:
    """Refuse what is not fine.

    Raises:
        Unfit: with the name, what is allowed, and what was got.
    """
    if not fine:
        told = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, Tensor) else shown(got)
        raise Unfit(f"{name} must be {allowed}, got {told}")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The value, if it is a whole number in this range."""
    expect(type(value) is int and least <= value <= most, name, f"a whole number from {least} to {most}", value)
    return value


def tensor(name: str, values: Any, shape: Sequence[int | None], integers: bool = False) -> Tensor:
    """The values, if they are a dense tensor of this kind and shape; None in the shape allows any size."""
    fine = isinstance(values, Tensor) and values.layout == torch.strided
    fine = fine and len(values.shape) == len(shape)
    fine = fine and all([size in (None, n) for size, n in zip(shape, values.shape, strict=True)])
    fine = fine and (values.dtype in (torch.int32, torch.int64) if integers else values.is_floating_point())
    expect(fine, name, f"a tensor of {'integers' if integers else 'floats'} of shape {list(shape)}", values)
    return values


def checked_forward(answer: Forward, rows: int, width: int, vocab: int) -> Forward:
    """A forward's answer over tokens [rows, width]. What it names that is no node becomes the nearest one.

    Raises:
        Unfit, or whatever comes of reading something else than a forward.
    """
    logits = tensor("logits", answer.logits, (rows, None, vocab))
    places = whole("places of logits", logits.shape[1], 1, width)
    if answer.nodes is not None:
        nodes = tensor("nodes", answer.nodes, (rows, places - 1), integers=True)
        answer.nodes = nodes.long().clamp(-1, width - 2)
    for name, states in answer.features.items():  # those of a prompt have places of their own
        tensor(f"features[{name}]", states, (rows, places if width > 1 else None, None))
    return answer
