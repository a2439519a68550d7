"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .base import ModelDrafter
from .drafter import MOST_CANDIDATES, DraftModelConfig, DraftModelDrafter
from .early_exit import early_exit
from .growing import GrowingSession
from .model_draft import ModelDraft
from .rules import Estimate, Own, Planned, Stepwise, StopRule
from .session import DraftModelSession, candidates_of
from .steps import Step, Steps
from .translating import Translated

__all__ = [
    "MOST_CANDIDATES",
    "DraftModelConfig",
    "DraftModelDrafter",
    "DraftModelSession",
    "Estimate",
    "GrowingSession",
    "ModelDraft",
    "ModelDrafter",
    "Own",
    "Planned",
    "Step",
    "Steps",
    "Stepwise",
    "StopRule",
    "Translated",
    "candidates_of",
    "early_exit",
]
