"""One folder per drafter; importing this package registers them all."""

from .base import Draft, DraftContext, Drafter, DraftSession, Sequences, Verdict
from .draft_model import DraftModelDrafter

__all__ = ["Draft", "DraftContext", "DraftModelDrafter", "DraftSession", "Drafter", "Sequences", "Verdict"]
