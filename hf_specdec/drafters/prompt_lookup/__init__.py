"""Copies of what followed the same words before."""

from .config import PromptLookupConfig
from .drafter import PromptLookupDrafter

__all__ = ["PromptLookupConfig", "PromptLookupDrafter"]
