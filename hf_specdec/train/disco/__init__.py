"""Training of DISCO's stop classifier (Mamou 2024, Appendices D and E)."""

from .extraction import Regime, extract
from .fitting import Quality, fit, quality
from .run import TrainSettings, closing, train_disco

__all__ = ["Quality", "Regime", "TrainSettings", "closing", "extract", "fit", "quality", "train_disco"]
