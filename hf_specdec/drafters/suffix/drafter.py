"""`SuffixDrafter`: the likeliest continuation in the row's own text or in past outputs. Needs no model.

Rows of a call copy from each other. All calls of a drafter share a store of token sequences, to which each output is
added when it ends. So a drafter that serves similar requests drafts better the longer it is used.
"""

from typing import Any

from ...budget import Acceptance, Learned
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ..base import Drafter
from ..prompt_lookup import PromptLookupConfig
from ..sources import Copies, Memory, SuffixStore
from ..trees import TreeSession
from .config import SuffixConfig


@register_drafter
class SuffixDrafter(Drafter):
    """Drafts from past outputs; `store` may be filled from a corpus, saved, loaded and shared between drafters."""

    config_class = SuffixConfig
    reads_prompt = False
    config: SuffixConfig

    def __init__(self, store: SuffixStore | None = None, **options: Any) -> None:
        """
        Args:
            store: past outputs to draft from, which other drafters may share; a new one where None.
            options: of `SuffixConfig`.

        Raises:
            SpeculationError: a bad option.
        """
        super().__init__(**options)
        self.store = SuffixStore(self.config.memory_mb) if store is None else store
        self.proposes_trees = self.config.num_branches > 1
        self._acceptance = Learned(Acceptance)

    def start(self, context: DraftContext) -> TreeSession:
        acceptance, config = self._acceptance.of(context.target, context.do_sample), self.config
        own = PromptLookupConfig(
            max_draft_tokens=config.max_draft_tokens,
            tokens_per_match=config.tokens_per_match,
            max_match=config.max_match,
            num_branches=config.num_branches,
        )
        sources = [Copies(context, own, acceptance), Memory(context, config, self.store, acceptance)]
        return TreeSession(context, acceptance, sources)
