"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer over the target's low, middle and high states drafts a chain."""

from .drafter import EagleConfig, EagleDrafter

__all__ = ["EagleConfig", "EagleDrafter"]
