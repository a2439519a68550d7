"""Training of EAGLE-3 heads (Li et al. 2025), on text that the target writes itself."""

from .run import EagleSettings, closing, train_eagle

__all__ = ["EagleSettings", "closing", "train_eagle"]
