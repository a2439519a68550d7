"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .base import ModelDrafter
from .drafter import MOST_CANDIDATES, DraftModelConfig, DraftModelDrafter
from .growing import GrowingSession
from .session import DraftModelSession, candidates_of
from .stepped import BudgetedSession, SteppedSession
from .translating import Translated

__all__ = [
    "MOST_CANDIDATES",
    "BudgetedSession",
    "DraftModelConfig",
    "DraftModelDrafter",
    "DraftModelSession",
    "GrowingSession",
    "ModelDrafter",
    "SteppedSession",
    "Translated",
    "candidates_of",
]
