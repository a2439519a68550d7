"""Speculative Streaming: the target drafts for itself (Bhendawade 2024)."""

from .config import StreamingConfig
from .drafter import StreamingDrafter
from .session import StreamingSession
from .streams import LowRank, Streams
from .upper import Upper, with_streams

__all__ = [
    "LowRank",
    "StreamingConfig",
    "StreamingDrafter",
    "StreamingSession",
    "Streams",
    "Upper",
    "with_streams",
]
