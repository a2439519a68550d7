"""What joins trees of tokens without a step of any model: copies, past outputs, recycled candidates."""

from .copies import Copies
from .past import Memory
from .recycled import Recycled
from .source import Source, named
from .store import SuffixStore

__all__ = ["Copies", "Memory", "Recycled", "Source", "SuffixStore", "named"]
