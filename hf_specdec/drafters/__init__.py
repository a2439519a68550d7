"""One folder per drafter; importing this package registers them all."""

from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..session import DraftSession
from .auto import AutoDrafter
from .base import Drafter
from .disco import DiscoDrafter, DiscoStoppingCriteria
from .draft_model import DraftModelDrafter, Translated, early_exit
from .heads import DFlashDrafter, EagleDrafter, Gemma4Drafter, MtpDrafter
from .hybrid import HybridDrafter
from .ngram import NGramDrafter
from .pearl import PearlDrafter
from .prompt_lookup import PromptLookupDrafter
from .streaming import StreamingDrafter
from .suffix import SuffixDrafter

__all__ = [
    "AutoDrafter",
    "DFlashDrafter",
    "DiscoDrafter",
    "DiscoStoppingCriteria",
    "Draft",
    "DraftContext",
    "DraftModelDrafter",
    "DraftSession",
    "Drafter",
    "EagleDrafter",
    "Gemma4Drafter",
    "HybridDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "PearlDrafter",
    "PromptLookupDrafter",
    "Sequences",
    "StreamingDrafter",
    "SuffixDrafter",
    "Translated",
    "Verdict",
    "early_exit",
]
