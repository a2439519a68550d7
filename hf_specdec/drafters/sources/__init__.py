"""What joins the tokens of streams, heads and draft models, without a step of any model."""

from .recycled import Recycled
from .sources import Sources

__all__ = ["Recycled", "Sources"]
