"""Training of EAGLE-3 heads (Li et al. 2025), on text that the target writes itself."""

from .run import EagleSettings, EagleTraining

__all__ = ["EagleSettings", "EagleTraining"]
