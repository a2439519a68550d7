"""`DiscoConfig`: the options of the DISCO drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class DiscoConfig(DrafterConfig):
    """What training found, and what a user may change afterwards."""

    drafter_type: ClassVar[str] = "disco"

    rule: Literal["token", "draft"] = "draft"
    """stop when the last token's chance of acceptance falls below τ, or when the whole draft's does"""
    tau: float = ranged(0.4, 0, 1)
    """τ in greedy decoding, a chance"""
    tau_sampled: float = ranged(0.4, 0, 1)
    """τ in sampling, a chance"""
    max_draft_tokens: int = ranged(16, 1, LONGEST_DRAFT)
    """SLmax, from 1 to 512"""
    lookup: bool = True
    """whether the classifier sees if copying from earlier text proposes the draft's best token; set by training"""
    k: int = ranged(10, 1, 1024)
    """how many of the draft's top probabilities the classifier sees, from 1 to 1024; written by training"""
    hidden: int = ranged(32, 1, 1024)
    """its inner units, from 1 to 1024; written by training"""
    draft_fingerprint: str | None = None
    """of the draft that the classifier was trained for; written by training"""

    def validate_fingerprint(self) -> None:
        if self.draft_fingerprint is not None and len(self.draft_fingerprint) > 64:
            raise ValueError(f"draft_fingerprint must have at most 64 characters, got {len(self.draft_fingerprint)}")
