"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .base import ModelDrafter
from .drafter import MOST_CANDIDATES, DraftModelConfig, DraftModelDrafter
from .early_exit import early_exit
from .model_draft import Estimate, ModelDraft
from .translating import Translated

__all__ = [
    "MOST_CANDIDATES",
    "DraftModelConfig",
    "DraftModelDrafter",
    "Estimate",
    "ModelDraft",
    "ModelDrafter",
    "Translated",
    "early_exit",
]
