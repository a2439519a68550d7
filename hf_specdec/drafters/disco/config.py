"""`DiscoConfig`: the options of the DISCO drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import DrafterConfig


@strict
@dataclass(kw_only=True)
class DiscoConfig(DrafterConfig):
    """What training found, and what a user may change afterwards."""

    drafter_type: ClassVar[str] = "disco"

    rule: Literal["token", "draft"] = "draft"
    """stop when the last token's chance of acceptance falls below τ, or when the whole draft's does"""
    tau: float = 0.4
    """τ in greedy decoding"""
    tau_sampled: float = 0.4
    """τ in sampling"""
    max_draft_tokens: int = 16
    """SLmax"""
    lookup: bool = True
    """whether the classifier sees if copying from earlier text proposes the draft's best token; set by training"""
    k: int = 10
    """how many of the draft's top probabilities the classifier sees; written by training"""
    hidden: int = 32
    """its inner units; written by training"""
    draft_fingerprint: str | None = None
    """of the draft that the classifier was trained for; written by training"""

    def validate_ranges(self) -> None:
        for name in ("tau", "tau_sampled"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a chance and must lie in [0, 1], got {getattr(self, name)}")
        for name in ("max_draft_tokens", "k", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
