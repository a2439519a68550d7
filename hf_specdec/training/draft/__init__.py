"""Training of a draft model by distillation, on text that the target writes itself."""

from .run import DraftSettings, train_draft

__all__ = ["DraftSettings", "train_draft"]
