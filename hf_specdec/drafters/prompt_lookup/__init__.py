"""Copies of what followed the same words before."""

from .config import PromptLookupConfig
from .copies import Copies
from .drafter import PromptLookupDrafter
from .index import LookupIndex
from .session import PromptLookupSession

__all__ = ["Copies", "LookupIndex", "PromptLookupConfig", "PromptLookupDrafter", "PromptLookupSession"]
