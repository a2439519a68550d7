"""Speculative Streaming: the target drafts for itself (Bhendawade 2024)."""

from .config import StreamingConfig
from .drafter import StreamingDrafter
from .steps import StreamSteps
from .streams import LowRank, Streams
from .upper import Upper, with_streams

__all__ = [
    "LowRank",
    "StreamSteps",
    "StreamingConfig",
    "StreamingDrafter",
    "Streams",
    "Upper",
    "with_streams",
]
