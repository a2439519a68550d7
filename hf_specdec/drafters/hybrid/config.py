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
    """Options of `HybridDrafter`: those of prompt lookup, and its own."""

    drafter_type: ClassVar[str] = "hybrid"

    num_draft_tokens: int | Literal["auto"] = ranged(
        "auto",
        1,
        LONGEST_DRAFT,
        'γ of the draft model. A number is drafted in full; "auto" stops where the next step does not promise to pay',
    )
    num_candidates: int = ranged(
        4, 1, MOST_CANDIDATES, "draft-model tokens thought of at each position. Those that pay are verified"
    )
    num_branches: int = ranged(3, 1, 64, "competing copies that join the tree. Those that pay are verified")
    num_recycled: int = ranged(
        4,
        0,
        MOST_CANDIDATES,
        "tokens remembered behind each token. They are those that the target found likely there, and are thought of "
        "when it comes again; 0 for none",
    )
    memory_mb: int = ranged(
        0,
        0,
        1 << 16,
        "bound of a memory of past outputs, in 2^20 bytes. What they went on with joins the tree, and the oldest make "
        "room; 0 for none",
    )
