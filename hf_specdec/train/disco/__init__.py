"""Training of DISCO's stop classifier (Mamou 2024, Appendices D and E)."""

from .fitting import Quality, fit, quality
from .records import answers, records_of
from .run import TrainSettings, closing, train_disco

__all__ = ["Quality", "TrainSettings", "answers", "closing", "fit", "quality", "records_of", "train_disco"]
