"""Training of streams (Speculative Streaming, Bhendawade 2024), on text that the target writes itself."""

from .run import StreamingSettings, StreamingTraining

__all__ = ["StreamingSettings", "StreamingTraining"]
