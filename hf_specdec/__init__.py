"""Speculative decoding inside Hugging Face `model.generate`: faster, the same text.

Importing this package registers it with transformers:

    model.generate(**inputs, assistant_model=drafter)
    model.generate(**inputs, assistant_model=draft_model, speculation_type="draft_model")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .drafters import (
    AutoDrafter,
    DFlashDrafter,
    DiscoDrafter,
    DiscoStoppingCriteria,
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    Gemma4Drafter,
    HybridDrafter,
    MtpDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    StreamingDrafter,
    SuffixDrafter,
    Translated,
    early_exit,
)
from .errors import SpeculationError, SpeculationWarning
from .generate import register, unregister
from .generate.decoder import BatchDecoder
from .generate.warming import warm_up
from .stats import SpeculationStats
from .target.packing import pack_linear, unpack_linear
from .target.shelf import release
from .tools.answers import AnswerFile
from .verify.speculate import speculate
from .version import __version__

if TYPE_CHECKING:
    from .tools.loading.models import load

__all__ = [
    "AnswerFile",
    "AutoDrafter",
    "BatchDecoder",
    "DFlashDrafter",
    "DiscoDrafter",
    "DiscoStoppingCriteria",
    "DraftModelDrafter",
    "Drafter",
    "EagleDrafter",
    "Gemma4Drafter",
    "HybridDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "PearlDrafter",
    "PromptLookupDrafter",
    "SpeculationError",
    "SpeculationStats",
    "SpeculationWarning",
    "StreamingDrafter",
    "SuffixDrafter",
    "Translated",
    "__version__",
    "early_exit",
    "load",
    "pack_linear",
    "register",
    "release",
    "speculate",
    "unpack_linear",
    "unregister",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """`load` needs models and auto classes, which take longer to import than all of this package."""
    if name == "load":
        return import_module(".tools.loading.models", __name__).load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What an editor offers: the public names."""
    return list(__all__)


register()
