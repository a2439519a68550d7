"""`Memory`: past outputs as a source of tokens for trees."""

from collections.abc import Sequence

from ...budget import Acceptance, Tree
from ...protocol import DraftContext, Sequences, Verdict
from ..prompt_lookup.branches import Branches, cut
from ..prompt_lookup.rates import add_copy
from .likely import likely_branches
from .store import Continuations, SuffixStore

PAST = "remembered"
"""source of what past outputs say: its chances are counted apart"""
MAX_MATCH = 32
"""longer matches count as this long"""
PER_MATCH = 4
"""tokens per matched token"""
LONGEST = 16
"""tokens that a remembered text is gone on with"""
MIN_PROBABILITY = 0.2
"""of the matched occurrences, below which a token is not thought of"""


class Remembering:
    """The rows of one call and a store: each output that ends is added."""

    def __init__(self, store: SuffixStore, max_match: int) -> None:
        self.store, self.max_match = store, max_match
        self.texts: dict[int, list[int]] = {}
        """by row, its output so far behind as much of its prompt as a match may need; rows that have ended are gone"""

    def continuations(self, row: int, tokens: Sequence[int], most: int) -> Continuations:
        """What past outputs went on with, `most` tokens deep, where they stood as a row's text does."""
        text = self.texts.setdefault(row, list(tokens[-self.max_match :]))
        return self.store.continuations(text[-self.max_match :], most, self.max_match)

    def observe(self, verdict: Verdict) -> None:
        """Rows have grown, and some have ended."""
        for row, tokens, stopped in zip(verdict.rows, verdict.tokens, verdict.stopped, strict=True):
            if row in self.texts:
                self.texts[row] += tokens
                if stopped:
                    self.store.add(self.texts.pop(row))

    def close(self) -> None:
        """A call that ended early leaves what it has written, too."""
        for text in self.texts.values():
            self.store.add(text)
        self.texts.clear()


class Memory(Remembering):
    """What followed in past outputs where they stood as the text does, for trees."""

    def __init__(self, context: DraftContext, store: SuffixStore, acceptance: Acceptance, branches: int) -> None:
        super().__init__(store, MAX_MATCH)
        self.context, self.acceptance = context, acceptance
        self.branches = branches if context.trees else 1

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add to each row's tree what past outputs went on with, at most `budget` deep."""
        self.texts = sequences.here(self.texts)
        lengths, found = [], []
        for row, tokens, room in zip(sequences.rows, sequences.tokens, budget, strict=True):
            length, branches = self._found(row, tokens, room)
            lengths.append(length)
            found.append(branches)
        for tree, length, branches in zip(trees, lengths, cut(found, sequences, self.context), strict=True):
            for i, branch in enumerate(branches):
                add_copy(tree, branch, length, MAX_MATCH, self.acceptance, i, source=PAST)

    def _found(self, row: int, tokens: Sequence[int], room: int) -> tuple[int, Branches]:
        """How long the longest match is, and its likeliest continuations."""
        if room < 1:  # also of rows that have ended: what follows there is padding
            return 0, []
        past = self.continuations(row, tokens, min(LONGEST, room))
        depth = min(LONGEST, room, PER_MATCH * past.length)
        branches = likely_branches(past.tokens, self.branches * depth, depth, self.branches, MIN_PROBABILITY)
        return past.length, branches
