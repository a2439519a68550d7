"""`SuffixDrafter`: the likeliest continuation in the row's own text or in past outputs. Needs no model.

All calls of a drafter share a store of token sequences, to which each output is added when it ends. So a drafter that
serves similar requests drafts better the longer it is used.
"""

from ...budget import Acceptance, Learned
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ..base import Drafter
from .config import SuffixConfig
from .session import SuffixSession
from .store import SuffixStore


@register_drafter
class SuffixDrafter(Drafter):
    """Drafts from past outputs; `store` may be filled from a corpus, saved, loaded and shared between drafters."""

    config_class = SuffixConfig
    reads_prompt = False
    config: SuffixConfig

    def __init__(
        self,
        store: SuffixStore | None = None,
        *,
        max_draft_tokens: int = 32,
        tokens_per_match: int = 2,
        max_match: int = 32,
        min_probability: float = 0.2,
        num_branches: int = 1,
        memory_mb: int = 64,
    ) -> None:
        """
        Args:
            store: past outputs to draft from, which other drafters may share; a new one where None.
            max_draft_tokens: the longest draft, or branch of a tree, from 1 to 512.
            tokens_per_match: draft tokens per matched token, from 1 to 512: a short match drafts little, a long one
                much.
            max_match: places are found by so many last tokens at most; from 2 to 256.
            min_probability: tokens that a smaller share of the matched occurrences in past outputs went through are not
                drafted; from 0 to 1.
            num_branches: competing continuations of a token drafted at once as a tree of 1 + 1/2 + ... times a chain's
                tokens, from 1 to 64; 1 drafts a chain.
            memory_mb: bound of a new store's memory in 2^20 bytes, from 1 to 65536; the oldest tokens make room.

        Raises:
            SpeculationError: a bad option.
        """
        super().__init__(
            max_draft_tokens=max_draft_tokens,
            tokens_per_match=tokens_per_match,
            max_match=max_match,
            min_probability=min_probability,
            num_branches=num_branches,
            memory_mb=memory_mb,
        )
        self.store = SuffixStore(self.config.memory_mb) if store is None else store
        self.proposes_trees = self.config.num_branches > 1
        self._acceptance = Learned(Acceptance)

    def start(self, context: DraftContext) -> SuffixSession:
        acceptance = self._acceptance.of(context.target, context.do_sample)
        return SuffixSession(context, self.config, self.store, acceptance)
