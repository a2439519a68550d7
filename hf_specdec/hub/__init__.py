"""Drafters on the Hugging Face Hub: load, save, push, and the `GenerationConfig` flag.

A drafter's repo holds JSON and safetensors. Nothing in it is run, `drafter_type` only ever indexes the registry, and
sizes are checked before anything is allocated.
"""

from .flag import drafter_from_flag
from .loading import load_drafter
from .push import push_drafter, push_folder, save_drafter
from .target import check_made_for, made_for

__all__ = [
    "check_made_for",
    "drafter_from_flag",
    "load_drafter",
    "made_for",
    "push_drafter",
    "push_folder",
    "save_drafter",
]
