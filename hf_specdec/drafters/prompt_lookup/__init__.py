"""Prompt lookup: copy what followed the longest earlier match of the current suffix. Needs no model.

Leviathan et al. 2023, §3.6, name copying from the context among the drafters of negligible cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...budget import Survival, Tree
from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...protocol import Draft, DraftContext, DraftSession, Sequences
from ...registry import register_drafter
from ..base import Drafter
from .branches import Branches, cut, cut_at_end, draft_from_branches
from .index import LookupIndex, Match
from .rates import add_copy

__all__ = ["LookupIndex", "Match", "PromptLookupConfig", "PromptLookupDrafter", "PromptLookupSession"]


@strict
@dataclass(kw_only=True)
class PromptLookupConfig(DrafterConfig):
    """Options of `PromptLookupDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "prompt_lookup"

    max_draft_tokens: int = ranged(16, 1, LONGEST_DRAFT)
    tokens_per_match: int = ranged(4, 1, LONGEST_DRAFT)
    min_match: int = ranged(1, 1, 256)
    max_match: int = ranged(8, 1, 256)
    num_branches: int = ranged(1, 1, 64)

    def validate_matches(self) -> None:
        if self.max_match < self.min_match:
            raise ValueError(f"max_match must be at least min_match={self.min_match}, got {self.max_match}")


class PromptLookupSession(DraftSession):
    """One index per row, fed with accepted tokens only."""

    def __init__(self, context: DraftContext, config: PromptLookupConfig) -> None:
        super().__init__(context)
        self.config = config
        self._indexes: dict[int, LookupIndex] = {}

    def index(self, row: int, tokens: list[int]) -> LookupIndex:
        """The row's index, brought up to date with its accepted tokens."""
        if row not in self._indexes:
            self._indexes[row] = LookupIndex(self.config.max_match)
        index = self._indexes[row]
        index.extend(tokens[len(index) :])
        return index

    def copies(self, sequences: Sequences, budget: list[int]) -> tuple[list[int], list[Branches]]:
        """Per row: the length of its longest match, and what to draft after it, the likeliest continuation first."""
        wanted = self.config.num_branches if self.context.trees else 1
        matches, branches = [], []
        for row, tokens, room in zip(sequences.rows, sequences.tokens, budget, strict=True):
            match, copies = self._copies(self.index(row, tokens), room, wanted)
            branches.append(copies)
            matches.append(match)
        return matches, cut(branches, sequences, self.context)

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int], survival: Survival) -> None:
        """Add each row's copies to its tree."""
        for tree, match, copies in zip(trees, *self.copies(sequences, budget), strict=True):
            for i, copied in enumerate(copies):
                add_copy(tree, copied, match, self.config.max_match, survival, i)

    def join_behind(self, tree: Tree, node: int, row: int, room: int, survival: Survival) -> None:
        """Add what followed earlier where the text stood as it does behind this node of a row's tree."""
        if self.context.forbids is not None:  # it would have to be asked about every place anew
            return
        path = tree.text(node)
        match, copies = self._copies(self._indexes[row], room - len(path), 1, path)
        if match > 1 and copies:
            copied = cut_at_end(copies[0], self.context)
            add_copy(tree, copied, match, self.config.max_match, survival, behind=node)

    def _copies(
        self, index: LookupIndex, room: int, wanted: int, drafted: Sequence[int] = ()
    ) -> tuple[int, list[list[int]]]:
        match = index.longest_match(self.config.min_match, wanted, drafted)
        length = min(self.config.max_draft_tokens, self.config.tokens_per_match * match.length, room)
        # The likeliest at full length, the i-th at 1/i of it.
        places = enumerate(match.positions)
        return match.length, [index.copy_from(place, length // (i + 1), drafted) for i, place in places]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        return draft_from_branches(self.copies(sequences, budget)[1], self.context)


@register_drafter
class PromptLookupDrafter(Drafter):
    """Copies what followed the same words before. Needs no model."""

    config_class = PromptLookupConfig
    config: PromptLookupConfig

    def __init__(
        self,
        *,
        max_draft_tokens: int = 16,
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
            max_match: longer matches count as this long; from 1 to 256, and at least `min_match`.
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

    def start(self, context: DraftContext) -> PromptLookupSession:
        return PromptLookupSession(context, self.config)
