"""`HybridConfig`: the options of the hybrid drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, ranged
from ..draft_model.drafter import MOST_CANDIDATES
from ..prompt_lookup import PromptLookupConfig


@strict
@dataclass(kw_only=True)
class HybridConfig(PromptLookupConfig):
    """Options of `HybridDrafter`, which says what they mean: those of prompt lookup, and the draft model's."""

    drafter_type: ClassVar[str] = "hybrid"

    num_draft_tokens: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    num_candidates: int = ranged(4, 1, MOST_CANDIDATES)
    num_branches: int = ranged(3, 1, 64)
    num_recycled: int = ranged(4, 0, MOST_CANDIDATES)
    memory_mb: int = ranged(0, 0, 1 << 16)
