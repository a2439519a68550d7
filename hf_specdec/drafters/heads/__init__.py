"""Heads that were trained with a target, and read its hidden states: those that the Hub's models bring along."""

from .dflash import DFlashConfig, DFlashDrafter
from .mtp import MtpConfig, MtpDrafter

__all__ = ["DFlashConfig", "DFlashDrafter", "MtpConfig", "MtpDrafter"]
