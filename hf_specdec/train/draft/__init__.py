"""Training of draft models that are cut out of their target, on text that the target writes itself."""

from .run import DraftSettings, DraftTraining

__all__ = ["DraftSettings", "DraftTraining"]
