"""What every command that decodes asks of its settings, before a model is loaded."""

import math

from torch import Tensor

from ...errors import SpeculationError, shown

LARGEST_SEED = 2**32 - 1
"""that torch, numpy and transformers all take"""


def check_prompt(prompt: str) -> None:
    """
    Raises:
        SpeculationError: there is nothing to continue.
    """
    if not prompt.strip():
        raise SpeculationError(f"prompt must hold text to continue, got {prompt!r}")


def check_tokens(ids: Tensor, prompt: str) -> None:
    """
    Raises:
        SpeculationError: a tokenizer knows nothing of a prompt.
    """
    if not ids.numel():
        raise SpeculationError(f"prompt {shown(prompt)} gives no token of the target's vocabulary; give another text")


def check_new_tokens(count: int) -> None:
    """
    Raises:
        SpeculationError: there is nothing to write.
    """
    if count < 1:
        raise SpeculationError(f"max_new_tokens must be 1 or more, got {count}")


def check_temperature(temperature: float) -> None:
    """
    Raises:
        SpeculationError: negative, infinite, or no number.
    """
    if not 0 <= temperature < math.inf:
        raise SpeculationError(f"temperature must be 0 (greedy) or more, got {temperature}")


def check_seed(seed: int) -> None:
    """
    Raises:
        SpeculationError: out of range.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise SpeculationError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
