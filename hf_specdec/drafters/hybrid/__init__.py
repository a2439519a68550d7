"""Copies and a draft model in one tree."""

from .drafter import HybridDrafter

__all__ = ["HybridDrafter"]
