"""`Memory`: past outputs as a source of tokens for trees."""

from collections.abc import Sequence

from ...budget import Survival, Tree
from ...protocol import DraftContext, Sequences, Verdict
from ..prompt_lookup.branches import Branches, cut
from ..prompt_lookup.rates import add_copy
from .likely import likely_branches
from .store import SuffixStore

PAST = "remembered"
"""source of what past outputs say: its chances are counted apart"""
MAX_MATCH = 32
"""longer matches count as this long"""
PER_MATCH = 4
"""tokens per matched token"""
LONGEST = 16
MIN_PROBABILITY = 0.2
"""of the matched occurrences, below which a token is not thought of"""


class Memory:
    """Of one call: what followed in past outputs where they stood as the text does. Outputs that end are added."""

    def __init__(self, context: DraftContext, store: SuffixStore, survival: Survival, branches: int) -> None:
        self.context, self.store, self.survival = context, store, survival
        self.branches = branches if context.trees else 1
        self.texts: dict[int, list[int]] = {}
        """by row, its output so far behind as much of its prompt as a match may need; rows that have ended are gone"""

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add to each row's tree what past outputs went on with, at most `budget` deep."""
        lengths, found = [], []
        for row, tokens, room in zip(sequences.rows, sequences.tokens, budget, strict=True):
            length, branches = self._found(self.texts.setdefault(row, tokens[-MAX_MATCH:]), room)
            lengths.append(length)
            found.append(branches)
        for tree, length, branches in zip(trees, lengths, cut(found, sequences, self.context), strict=True):
            for i, branch in enumerate(branches):
                add_copy(tree, branch, length, MAX_MATCH, self.survival, i, source=PAST)

    def _found(self, text: Sequence[int], room: int) -> tuple[int, Branches]:
        """How long the longest match is, and its likeliest continuations."""
        if room < 1:
            return 0, []
        past = self.store.continuations(text[-MAX_MATCH:], min(LONGEST, room), MAX_MATCH)
        depth = min(LONGEST, room, PER_MATCH * past.length)
        branches = likely_branches(past.tokens, self.branches * depth, depth, self.branches, MIN_PROBABILITY)
        return past.length, branches

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
