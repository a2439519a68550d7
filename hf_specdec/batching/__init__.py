"""Rows that come and go over one model: a batch that is never waited for."""

from .answer import Answer, QueueFull
from .decoder import BatchDecoder

__all__ = ["Answer", "BatchDecoder", "QueueFull"]
