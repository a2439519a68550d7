"""Checks of settings that every command that decodes makes before it loads a model."""

import math

from torch import Tensor

from ...errors import SpeculationError, shown

LARGEST_SEED = 2**32 - 1
"""that torch, numpy and transformers all take"""


def check_decoding(max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> None:
    """
    Raises:
        SpeculationError: one of them is out of range.
    """
    if max_new_tokens < 1:
        raise SpeculationError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    if not 0 <= temperature < math.inf:
        raise SpeculationError(f"temperature must be 0 (greedy) or more, got {temperature}")
    check_seed(seed)


def check_seed(seed: int) -> None:
    """
    Raises:
        SpeculationError: out of range.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise SpeculationError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")


def check_tokens(ids: Tensor, prompt: str) -> None:
    """
    Raises:
        SpeculationError: the prompt gives no token.
    """
    if not ids.numel():
        raise SpeculationError(f"prompt {shown(prompt)} gives no token of the target's vocabulary; give another text")
