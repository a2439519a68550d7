"""`DiscoConfig`: the options of the DISCO drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ..draft_model import MOST_CANDIDATES


@strict
@dataclass(kw_only=True)
class DiscoConfig(DrafterConfig):
    """Options of `DiscoDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "disco"

    rule: Literal["token", "budget"] = "budget"
    tau: float = ranged(0.4, 0, 1)
    tau_sampled: float = ranged(0.4, 0, 1)
    max_draft_tokens: int = ranged(16, 1, LONGEST_DRAFT)
    num_candidates: int = ranged(1, 1, MOST_CANDIDATES)
    lookup: bool = True
    sees_token: bool = False
    k: int = ranged(10, 1, 1024)
    hidden: int = ranged(32, 1, 1024)
    draft_fingerprint: str | None = None

    def threshold(self, do_sample: bool) -> float:
        """τ of a generation."""
        return self.tau_sampled if do_sample else self.tau

    def validate_fingerprint(self) -> None:
        if self.draft_fingerprint is not None and len(self.draft_fingerprint) > 64:
            raise ValueError(f"draft_fingerprint must have at most 64 characters, got {len(self.draft_fingerprint)}")
