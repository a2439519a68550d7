"""`PromptLookupConfig`: the options of prompt lookup."""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class PromptLookupConfig(DrafterConfig):
    """Options of `PromptLookupDrafter`."""

    drafter_type: ClassVar[str] = "prompt_lookup"

    max_draft_tokens: int = ranged(32, 1, LONGEST_DRAFT, "the longest copy")
    tokens_per_match: int = ranged(
        4, 1, LONGEST_DRAFT, "tokens copied per matched token. A short match copies little, a long one much"
    )
    min_match: int = ranged(1, 1, 256, "the shortest match that is copied behind")
    max_match: int = ranged(8, 1, 256, "the longest match that is looked for. At least `min_match`")
    num_branches: int = ranged(
        1,
        1,
        64,
        "continuations drafted at once, as a tree. The i-th has 1/i of the first one's length; 1 drafts a chain. More "
        "cost time on CPUs",
    )

    def validate_matches(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(f"max_match must be at least min_match={self.min_match}, got {self.max_match}")
