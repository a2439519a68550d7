"""Copies and a draft model in one tree."""

from .drafter import HybridDrafter
from .session import HybridSession

__all__ = ["HybridDrafter", "HybridSession"]
