"""Suffix drafter: the likeliest continuation in the row's own text or in past outputs. Needs no model.

A store of token sequences is shared by all calls of a drafter. Each output that ends is added to it, so a drafter that
serves similar requests drafts better the longer it is used.
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ...budget import Acceptance, Learned
from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...hub.registry import register_drafter
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ..base import Drafter
from ..prompt_lookup.branches import Branches, cut
from ..prompt_lookup.index import LookupIndex
from ..prompt_lookup.rates import LONGEST_MATCH, add_copy
from ..tree_session import TreeSession
from .likely import likely_branches
from .memory import PAST, Remembering
from .store import SuffixStore

__all__ = ["SuffixConfig", "SuffixDrafter", "SuffixSession", "SuffixStore"]

OWN = "copied"
"""of the row's own text: its chances are counted apart from those of past outputs"""


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


class SuffixSession(TreeSession):
    """One index per row beside the shared store; whichever matches further drafts."""

    def __init__(self, context: DraftContext, config: SuffixConfig, store: SuffixStore, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.config = config
        self.memory = Remembering(store, config.max_match)
        self._indexes: dict[int, LookupIndex] = {}

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self._indexes, self.memory.texts = sequences.here(self._indexes), sequences.here(self.memory.texts)
        drafts: list[Branches] = []
        matches: list[tuple[str, int]] = []
        for row, tokens, room in zip(sequences.rows, sequences.tokens, budget, strict=True):
            if room < 1:  # also of rows that have ended: what follows there is padding
                drafts.append([])
                matches.append((OWN, 0))
                continue
            if row not in self._indexes:
                self._indexes[row] = LookupIndex(self.config.max_match)
            self._indexes[row].extend(tokens[len(self._indexes[row]) :])
            match, branches = self._branches(row, self._indexes[row], room)
            drafts.append(branches)
            matches.append(match)
        allowed = cut(drafts, sequences, self.context)
        for tree, (source, length), branches in zip(self.begin(len(budget)), matches, allowed, strict=True):
            for i, branch in enumerate(branches):
                add_copy(tree, branch, length, self.config.max_match, self.acceptance, i, source=source)
        return self.draft()

    def _branches(self, row: int, index: LookupIndex, budget: int) -> tuple[tuple[str, int], Branches]:
        """Where the longer match lies and how long it is; its continuations."""
        config = self.config
        branches = config.num_branches if self.context.trees else 1
        most = min(config.max_draft_tokens, budget)
        own = index.longest_match(branches=branches)
        past = self.memory.continuations(row, index.tokens, most)
        if past.length > own.length:
            source, length, texts, least = PAST, past.length, past.tokens, config.min_probability
        else:  # one text per continuation, however often it was seen: their number is no vote
            source, length, least = OWN, index.agreed(own, LONGEST_MATCH), 0.0
            texts = [index.copy_from(place, most) for place in own.positions]
        depth = min(most, config.tokens_per_match * length)
        nodes = sum(
            ceil(depth / (i + 1)) for i in range(branches)
        )  # a chain's, and a token or more for each other branch
        return (source, length), likely_branches(texts, nodes, depth, branches, least)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        self.memory.observe(verdict)

    def close(self) -> None:
        self.memory.close()


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
