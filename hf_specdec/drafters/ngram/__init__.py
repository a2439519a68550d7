"""A table of n-grams that drafts (Leviathan et al. 2023, section 3.6)."""

from .drafter import NGramDrafter
from .drawing import NGramSession
from .model import Level, NGramModel

__all__ = ["Level", "NGramDrafter", "NGramModel", "NGramSession"]
