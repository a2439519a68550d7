"""A drafter of each kind, over a target and its draft model."""

from typing import Any

import models
from disco_models import disco

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter, SuffixDrafter

MAKES: dict[str, Any] = {
    "lookup": lambda target, draft: PromptLookupDrafter(),
    "lookup, branches": lambda target, draft: PromptLookupDrafter(num_branches=3),
    "suffix": lambda target, draft: SuffixDrafter(),
    "draft": lambda target, draft: DraftModelDrafter(draft, num_draft_tokens=3),
    "tree": lambda target, draft: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=2),
    "hybrid": lambda target, draft: HybridDrafter(draft, num_draft_tokens=3),
    "disco": lambda target, draft: disco_over(draft),
    "pearl": lambda target, draft: PearlDrafter(draft, window=3, worker="thread"),
}


def disco_over(draft: Any) -> Any:
    drafter = disco(models.llama(16))
    drafter.draft = draft
    return drafter
