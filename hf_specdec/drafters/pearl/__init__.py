"""PEARL: the draft model drafts while the target verifies (Liu et al. 2024)."""

from .config import PearlConfig
from .drafter import PearlDrafter
from .session import PearlSession
from .timeline import Timeline

__all__ = ["PearlConfig", "PearlDrafter", "PearlSession", "Timeline"]
