"""`Copies`: what followed the same words before, as nodes of a tree."""

from collections.abc import Sequence
from typing import Protocol

from ...budget import Acceptance, Tree
from ...protocol import DraftContext, Sequences
from .branches import Branches, cut, cut_at_end
from .index import LookupIndex
from .rates import LONGEST_MATCH, add_copy


class Options(Protocol):
    """What a config says of copies."""

    max_draft_tokens: int
    tokens_per_match: int
    min_match: int
    max_match: int
    num_branches: int


class Copies:
    """One index per row, fed with accepted tokens only."""

    def __init__(self, context: DraftContext, config: Options, acceptance: Acceptance) -> None:
        self.context, self.config, self.acceptance = context, config, acceptance
        self.indexes: dict[int, LookupIndex] = {}
        self._read: dict[int, int] = {}
        """tokens that an encoder was given for a row, which come before the text: summaries and edits copy them"""

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add each row's copies to its tree."""
        for tree, match, copies in zip(trees, *self.found(sequences, budget), strict=True):
            for i, copied in enumerate(copies):
                add_copy(tree, copied, match, self.config.max_match, self.acceptance, i)

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what followed earlier where the text stood as it does behind this node of a row's tree."""
        if self.context.forbids is not None:  # it would have to be asked about every place anew
            return
        path = tree.text(node)
        if len(path) >= room:
            return
        match, copies = self._copies(self.indexes[row], room - len(path), 1, path)
        if match > 1 and copies:
            copied = cut_at_end(copies[0], self.context)
            add_copy(tree, copied, match, self.config.max_match, self.acceptance, behind=node)

    def found(self, sequences: Sequences, budget: list[int]) -> tuple[list[int], list[Branches]]:
        """Per row: how many tokens of its end were met before, and what to draft behind it, the likeliest first."""
        wanted = self.config.num_branches if self.context.trees else 1
        self.indexes = sequences.here(self.indexes)
        matches, branches = [], []
        for row, tokens, room in zip(sequences.rows, sequences.tokens, budget, strict=True):
            match, copies = self._copies(self._index(row, tokens), room, wanted)
            branches.append(copies)
            matches.append(match)
        return matches, cut(branches, sequences, self.context)

    def _index(self, row: int, tokens: list[int]) -> LookupIndex:
        """The row's index, brought up to date with its accepted tokens."""
        if row not in self.indexes:
            self.indexes[row] = LookupIndex(self.config.max_match)
            self.indexes[row].extend(self.context.read(row))
            self._read[row] = len(self.indexes[row])
        index = self.indexes[row]
        index.extend(tokens[len(index) - self._read[row] :])
        return index

    def _copies(
        self, index: LookupIndex, room: int, wanted: int, drafted: Sequence[int] = ()
    ) -> tuple[int, list[list[int]]]:
        match = index.longest_match(self.config.min_match, wanted, drafted)
        met = index.agreed(match, LONGEST_MATCH, drafted)
        length = min(self.config.max_draft_tokens, self.config.tokens_per_match * met, room)
        # The likeliest at full length, the i-th at 1/i of it.
        places = enumerate(match.positions)
        return met, [index.copy_from(place, length // (i + 1), drafted) for i, place in places]
