"""Copies of what followed the same words before."""

from .copies import Copies
from .drafter import PromptLookupConfig, PromptLookupDrafter, PromptLookupSession
from .index import LookupIndex

__all__ = ["Copies", "LookupIndex", "PromptLookupConfig", "PromptLookupDrafter", "PromptLookupSession"]
