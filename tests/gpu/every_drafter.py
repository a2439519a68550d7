"""A target and a drafter of every type, small, random and often right, on the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import head_pairs
import models
from counted_rounds import DRAFTERS, VOCAB
from place import DEVICE, placed


def _of_llama(kind: str) -> tuple[Any, Any]:
    target = models.llama(VOCAB)
    drafter = placed(DRAFTERS[kind](target))
    return target.to(DEVICE), drafter


def _of_heads(pair: str) -> tuple[Any, Any]:
    target, drafter = head_pairs.PAIRS[pair]()
    return target.to(DEVICE), placed(drafter)


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {kind: (lambda kind=kind: _of_llama(kind)) for kind in DRAFTERS} | {
    "mtp": lambda: _of_heads("DeepSeek-V3, 3"),
    "block_diffusion": lambda: _of_heads("DFlash, mixed"),
    "eagle3": lambda: _of_heads("EAGLE-3, SafeAILab"),
    "gemma4": lambda: _of_heads("Gemma 4, E2B"),
}
"""by name: makes (target, drafter)"""


@contextmanager
def drafting_goes_on() -> Iterator[None]:
    """Also where nothing is gained by it: random heads are hardly ever right, and here no clock decides."""
    with (
        mock.patch("hf_specdec.budget.account.GIVEN", 1 << 30),
        mock.patch("hf_specdec.budget.Cost.round", lambda *_: lambda width: 1.0),
    ):
        yield
