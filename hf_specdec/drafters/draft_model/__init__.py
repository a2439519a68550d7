"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .ahead import read_ahead, read_stepwise
from .base import ModelDrafter
from .drafter import MOST_CANDIDATES, DraftModelConfig, DraftModelDrafter
from .growing import GrowingSession
from .session import DraftModelSession, candidates_of
from .stepped import BudgetedSession, SteppedSession
from .translating import translated, untranslated

__all__ = [
    "MOST_CANDIDATES",
    "BudgetedSession",
    "DraftModelConfig",
    "DraftModelDrafter",
    "DraftModelSession",
    "GrowingSession",
    "ModelDrafter",
    "SteppedSession",
    "candidates_of",
    "read_ahead",
    "read_stepwise",
    "translated",
    "untranslated",
]
