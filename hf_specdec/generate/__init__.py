"""transformers' `generate`: the hook, its options, and what they mean."""

from .hook import OWN_MODELS, drafter_for, prepared, register, unregister

__all__ = ["OWN_MODELS", "drafter_for", "prepared", "register", "unregister"]
