"""Copies from past outputs, too."""

from .drafter import SuffixConfig, SuffixDrafter
from .store import SuffixStore

__all__ = ["SuffixConfig", "SuffixDrafter", "SuffixStore"]
