"""Training of heads (EAGLE-3, DFlash, DSpark) on text that the target writes itself."""

from .run import TRAININGS, HeadSettings

__all__ = ["TRAININGS", "HeadSettings"]
