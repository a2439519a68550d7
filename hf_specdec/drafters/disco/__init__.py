"""DISCO: a trained classifier decides when to stop drafting (Mamou et al. 2024)."""

from .classifier import StopClassifier, features
from .config import DiscoConfig
from .criteria import DiscoStoppingCriteria
from .drafter import DiscoDrafter
from .session import Threshold

__all__ = [
    "DiscoConfig",
    "DiscoDrafter",
    "DiscoStoppingCriteria",
    "StopClassifier",
    "Threshold",
    "features",
]
