"""Speculative decoding inside Hugging Face `model.generate`: faster, the same text.

Importing this package registers it with transformers:

    model.generate(**inputs, assistant_model=drafter)
    model.generate(**inputs, assistant_model=draft_model, speculation_type="draft_model")
"""

from .batching import BatchDecoder
from .drafters import (
    DiscoDrafter,
    DiscoStoppingCriteria,
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    StreamingDrafter,
    SuffixDrafter,
)
from .errors import SpeculationError, SpeculationWarning
from .integration import register, unregister
from .packing import pack_linear, unpack_linear
from .stats import SpeculationStats
from .version import __version__

__all__ = [
    "BatchDecoder",
    "DiscoDrafter",
    "DiscoStoppingCriteria",
    "DraftModelDrafter",
    "Drafter",
    "HybridDrafter",
    "NGramDrafter",
    "PearlDrafter",
    "PromptLookupDrafter",
    "SpeculationError",
    "SpeculationStats",
    "SpeculationWarning",
    "StreamingDrafter",
    "SuffixDrafter",
    "__version__",
    "pack_linear",
    "register",
    "unpack_linear",
    "unregister",
]


def __dir__() -> list[str]:
    """What an editor offers: the public names."""
    return list(__all__)


register()
