"""Training of a draft model by distillation, on text that the target writes itself."""

from .run import DraftSettings, closing, train_draft

__all__ = ["DraftSettings", "closing", "train_draft"]
