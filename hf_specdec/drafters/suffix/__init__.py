"""Copies from past outputs, too."""

from ..sources import SuffixStore
from .drafter import SuffixConfig, SuffixDrafter

__all__ = ["SuffixConfig", "SuffixDrafter", "SuffixStore"]
