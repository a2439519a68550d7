"""A table of n-grams that drafts (Leviathan et al. 2023, section 3.6)."""

from .config import NGramConfig
from .drafter import NGramDrafter
from .model import Level, NGramModel
from .steps import NGramSteps

__all__ = ["Level", "NGramConfig", "NGramDrafter", "NGramModel", "NGramSteps"]
