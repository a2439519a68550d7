"""Heads that were trained with a target, and read its hidden states. Each kind has a file of its own, which is imported
here."""

from .dflash import DFlashDrafter
from .drafter import HeadDrafter, PublishedHeadDrafter
from .eagle import EagleDrafter
from .gemma4 import Gemma4Drafter
from .head import ChainHead, Head
from .mtp import MtpDrafter

__all__ = [
    "ChainHead",
    "DFlashDrafter",
    "EagleDrafter",
    "Gemma4Drafter",
    "Head",
    "HeadDrafter",
    "MtpDrafter",
    "PublishedHeadDrafter",
]
