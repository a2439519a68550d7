"""`SuffixSession`: copies from the row's own text or from past outputs, whichever matches further."""

from math import ceil

from ...budget import Acceptance
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ..prompt_lookup.copies import LONGEST_MATCH, Branches, add_copy, cut
from ..prompt_lookup.index import LookupIndex
from ..trees import TreeSession
from .config import SuffixConfig
from .memory import PAST, PastOutputs, likely_branches
from .store import SuffixStore

OWN = "copied"
"""Source of copies from the row's own text. Their chances are counted apart from those of past outputs."""


class SuffixSession(TreeSession):
    """One index per row beside the shared store. The one with the longer match drafts."""

    def __init__(self, context: DraftContext, config: SuffixConfig, store: SuffixStore, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.config = config
        self.memory = PastOutputs(store, config.max_match)
        self._indexes: dict[int, LookupIndex] = {}

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self._indexes, self.memory.texts = sequences.here(self._indexes), sequences.here(self.memory.texts)
        drafts: list[Branches] = []
        matches: list[tuple[str, int]] = []
        for row, tokens, most in zip(sequences.rows, sequences.tokens, room, strict=True):
            if most < 1:  # also of rows that have ended: what follows there is padding
                drafts.append([])
                matches.append((OWN, 0))
                continue
            if row not in self._indexes:
                self._indexes[row] = LookupIndex(self.config.max_match)
            self._indexes[row].extend(tokens[len(self._indexes[row]) :])
            match, branches = self._branches(row, self._indexes[row], most)
            drafts.append(branches)
            matches.append(match)
        allowed = cut(drafts, sequences, self.context)
        for tree, (source, length), branches in zip(self.begin(len(room)), matches, allowed, strict=True):
            for i, branch in enumerate(branches):
                add_copy(tree, branch, length, self.config.max_match, self.acceptance, i, source=source)
        return self.draft()

    def _branches(self, row: int, index: LookupIndex, room: int) -> tuple[tuple[str, int], Branches]:
        """Source and length of the longer match, and its continuations."""
        config = self.config
        branches = config.num_branches if self.context.trees else 1
        most = min(config.max_draft_tokens, room)
        own = index.longest_match(branches=branches)
        past = self.memory.continuations(row, index.tokens, most)
        if past.length > own.length:
            source, length, texts, least = PAST, past.length, past.tokens, config.min_probability
        else:  # one text per continuation, however often it was seen: their number is no vote
            source, length, least = OWN, index.agreed(own, LONGEST_MATCH), 0.0
            texts = [index.copy_from(place, most) for place in own.positions]
        depth = min(most, config.tokens_per_match * length)
        nodes = sum(ceil(depth / i) for i in range(1, branches + 1))  # a chain's, and some for each other branch
        return (source, length), likely_branches(texts, nodes, depth, branches, least)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        self.memory.observe(verdict)

    def close(self) -> None:
        self.memory.close()
