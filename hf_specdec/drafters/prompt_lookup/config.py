"""`PromptLookupConfig`: the options of prompt lookup."""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class PromptLookupConfig(DrafterConfig):
    """Options of `PromptLookupDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "prompt_lookup"

    max_draft_tokens: int = ranged(32, 1, LONGEST_DRAFT)
    tokens_per_match: int = ranged(4, 1, LONGEST_DRAFT)
    min_match: int = ranged(1, 1, 256)
    max_match: int = ranged(8, 1, 256)
    num_branches: int = ranged(1, 1, 64)

    def validate_matches(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(f"max_match must be at least min_match={self.min_match}, got {self.max_match}")
