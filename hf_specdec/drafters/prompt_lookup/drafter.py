"""`PromptLookupDrafter`: copies what followed the longest earlier match of the text's end. Needs no model.

Leviathan et al. 2023, section 3.6, name copying from the context among the drafters of negligible cost.
"""

from ...budget import Acceptance, Learned
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ..base import Drafter
from .config import PromptLookupConfig
from .session import PromptLookupSession


@register_drafter
class PromptLookupDrafter(Drafter):
    """Copies what followed the same words before. Needs no model."""

    config_class = PromptLookupConfig
    reads_prompt = False
    config: PromptLookupConfig

    def __init__(
        self,
        *,
        max_draft_tokens: int = 32,
        tokens_per_match: int = 4,
        min_match: int = 1,
        max_match: int = 8,
        num_branches: int = 1,
    ) -> None:
        """
        Args:
            max_draft_tokens: the longest draft, from 1 to 512.
            tokens_per_match: draft tokens per matched token, from 1 to 512: a short match drafts little, a long one
                much.
            min_match: shorter matches draft nothing; from 1 to 256.
            max_match: places are found by so many last tokens at most; from 1 to 256, and at least `min_match`.
            num_branches: competing continuations drafted at once as a tree, from 1 to 64; 1 drafts a chain.

        Raises:
            SpeculationError: a bad option.
        """
        super().__init__(
            max_draft_tokens=max_draft_tokens,
            tokens_per_match=tokens_per_match,
            min_match=min_match,
            max_match=max_match,
            num_branches=num_branches,
        )
        self.proposes_trees = self.config.num_branches > 1
        self._acceptance = Learned(Acceptance)

    def start(self, context: DraftContext) -> PromptLookupSession:
        return PromptLookupSession(context, self.config, self._acceptance.of(context.target, context.do_sample))
