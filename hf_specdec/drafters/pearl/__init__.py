"""PEARL: the draft model drafts while the target verifies (Liu et al. 2024)."""

from .drafter import PearlConfig, PearlDrafter
from .session import PearlSession
from .timeline import Timeline

__all__ = ["PearlConfig", "PearlDrafter", "PearlSession", "Timeline"]
