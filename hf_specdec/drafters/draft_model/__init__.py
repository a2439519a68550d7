"""Drafting with a smaller model (Leviathan 2023, Algorithm 1)."""

from .base import ModelDrafter
from .drafter import DraftModelConfig, DraftModelDrafter
from .growing import GrowingSession
from .session import DraftModelSession

__all__ = ["DraftModelConfig", "DraftModelDrafter", "DraftModelSession", "GrowingSession", "ModelDrafter"]
