"""What joins trees of tokens without a step of any model: copies, past outputs, recycled candidates, what a
grammar forces."""

from .copies import Copies
from .forced import Forced
from .past import Memory
from .recycled import Recycled
from .source import Source, named
from .store import SuffixStore

__all__ = ["Copies", "Forced", "Memory", "Recycled", "Source", "SuffixStore", "named"]
