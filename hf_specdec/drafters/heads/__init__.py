"""Heads that were trained with a target, and read its hidden states: those that the Hub's models bring along."""

from .dflash import DFlashConfig, DFlashDrafter
from .draft import HeadDraft
from .drafter import HeadDrafter
from .mtp import MtpConfig, MtpDrafter

__all__ = ["DFlashConfig", "DFlashDrafter", "HeadDraft", "HeadDrafter", "MtpConfig", "MtpDrafter"]
