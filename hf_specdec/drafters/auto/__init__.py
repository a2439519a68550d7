"""A drafter that is chosen for the target."""

from .drafter import AutoDrafter

__all__ = ["AutoDrafter"]
