"""Training of streams (Speculative Streaming, Bhendawade 2024), on text that the target writes itself."""

from .run import StreamingSettings, closing, train_streaming

__all__ = ["StreamingSettings", "closing", "train_streaming"]
