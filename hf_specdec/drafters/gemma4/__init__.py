"""Gemma 4's assistants: small models that look at the target's own keys and values, and draft a chain."""

from .drafter import Gemma4Config, Gemma4Drafter

__all__ = ["Gemma4Config", "Gemma4Drafter"]
