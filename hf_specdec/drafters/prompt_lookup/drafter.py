"""Prompt lookup: copy what followed the longest earlier match of the current suffix. Needs no model.

Leviathan et al. 2023, §3.6, name copying from the context among the drafters of negligible cost.
"""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...budget import Acceptance, Learned
from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...hub.registry import register_drafter
from ...protocol import Draft, DraftContext, Sequences
from ..base import Drafter
from ..tree_session import TreeSession
from .copies import Copies
from .index import LookupIndex, Match

__all__ = ["Copies", "LookupIndex", "Match", "PromptLookupConfig", "PromptLookupDrafter", "PromptLookupSession"]


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


class PromptLookupSession(TreeSession):
    """Drafts copies of the row's own text."""

    def __init__(self, context: DraftContext, config: PromptLookupConfig, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.copies = Copies(context, config, acceptance)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.copies.join(self.begin(len(budget)), sequences, budget)
        return self.draft()


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
