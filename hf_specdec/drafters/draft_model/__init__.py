"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .ahead import read_ahead, read_stepwise
from .base import ModelDrafter
from .drafter import DraftModelConfig, DraftModelDrafter
from .growing import GrowingSession
from .session import DraftModelSession
from .translating import translated, untranslated

__all__ = [
    "DraftModelConfig",
    "DraftModelDrafter",
    "DraftModelSession",
    "GrowingSession",
    "ModelDrafter",
    "read_ahead",
    "read_stepwise",
    "translated",
    "untranslated",
]
