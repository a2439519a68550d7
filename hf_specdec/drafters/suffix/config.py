"""`SuffixConfig`: the options of the suffix drafter."""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class SuffixConfig(DrafterConfig):
    """Options of `SuffixDrafter`."""

    drafter_type: ClassVar[str] = "suffix"

    max_draft_tokens: int = ranged(32, 1, LONGEST_DRAFT, "the longest draft, or branch of a tree")
    tokens_per_match: int = ranged(
        2, 1, LONGEST_DRAFT, "draft tokens per matched token. A short match drafts little, a long one much"
    )
    max_match: int = ranged(32, 2, 256, "the longest match that is looked for")
    min_probability: float = ranged(
        0.2, 0, 1, "share of the votes below which a token is not drafted. Each match in past outputs has a vote"
    )
    num_branches: int = ranged(
        1,
        1,
        64,
        "continuations drafted at once, as a tree. It has 1 + 1/2 + ... times a chain's tokens; 1 drafts a chain",
    )
    memory_mb: int = ranged(64, 1, 1 << 16, "bound of a new store's memory, in 2^20 bytes. The oldest tokens make room")
