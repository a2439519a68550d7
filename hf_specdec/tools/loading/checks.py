"""Checks of settings, made before a model is loaded."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from ...errors import SpeculationError, shown


@dataclass(frozen=True)
class Range:
    """The finite numbers that a setting may be, beside its `Option`."""

    least: float
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.least <= number <= self.most

    def __str__(self) -> str:
        return f"{self.least} or more" if math.isinf(self.most) else f"from {self.least} to {self.most}"


SEEDS = Range(0, 2**32 - 1)
"""that torch, numpy and transformers all take"""


def check_settings(settings: Any) -> None:
    """Each setting that is one of several words, or has a `Range`: each of its numbers where it is a list; None is in
    any.

    Raises:
        SpeculationError: another word, or a number out of range.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value, words = getattr(settings, name), get_args(getattr(hint, "__origin__", None))
        if get_origin(getattr(hint, "__origin__", None)) is Literal and value not in words:
            raise SpeculationError(f"{name} must be {' or '.join(map(repr, words))}, got {value!r}")
        numbers = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for allowed in getattr(hint, "__metadata__", ()):
            if isinstance(allowed, Range) and (wrong := [number for number in numbers if number not in allowed]):
                raise SpeculationError(f"{name} must be {allowed}, got {wrong[0]}")


def check_tokens(ids: Tensor, prompt: str) -> None:
    """
    Raises:
        SpeculationError: the prompt gives no token.
    """
    if not ids.numel():
        raise SpeculationError(f"prompt {shown(prompt)} gives no token of the target's vocabulary; give another text")
