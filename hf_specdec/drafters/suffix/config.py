"""`SuffixConfig`: the options of the suffix drafter."""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class SuffixConfig(DrafterConfig):
    """Options of `SuffixDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "suffix"

    max_draft_tokens: int = ranged(32, 1, LONGEST_DRAFT)
    tokens_per_match: int = ranged(2, 1, LONGEST_DRAFT)
    max_match: int = ranged(32, 2, 256)
    min_probability: float = ranged(0.2, 0, 1)
    num_branches: int = ranged(1, 1, 64)
    memory_mb: int = ranged(64, 1, 1 << 16)
