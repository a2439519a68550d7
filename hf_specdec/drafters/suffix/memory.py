"""Past outputs as a source of tokens: what they went on with, alone (`PastOutputs`) or within trees (`Memory`)."""

import heapq
from collections import Counter
from collections.abc import Sequence

from ...budget import Acceptance, Tree
from ...protocol import DraftContext, Sequences, Verdict
from ..prompt_lookup.copies import Branches, add_copy, cut
from .store import Continuations, SuffixStore

PAST = "remembered"
"""Source of tokens from past outputs. Their chances are counted apart from those of copies of the text."""
MAX_MATCH = 32
"""Longer matches count as this long."""
PER_MATCH = 4
"""Tokens drafted per matched token."""
LONGEST = 16
"""Tokens that a branch has at most."""
MIN_PROBABILITY = 0.2
"""Tokens that a smaller share of the matched occurrences went on with are left out."""


class PastOutputs:
    """A store of past outputs, searched by the rows of one call. Each output that ends is added to it."""

    def __init__(self, store: SuffixStore, max_match: int) -> None:
        self.store, self.max_match = store, max_match
        self.texts: dict[int, list[int]] = {}
        """by row, its output so far behind the end of its prompt that a match may need; without rows that have ended"""

    def continuations(self, row: int, tokens: Sequence[int], most: int) -> Continuations:
        """What followed in past outputs after the longest match of a row's end, at most `most` tokens each."""
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
        """Add the outputs that have not ended, too."""
        for text in self.texts.values():
            self.store.add(text)
        self.texts.clear()


class Memory(PastOutputs):
    """Adds what followed in past outputs to the trees of a session."""

    def __init__(self, context: DraftContext, store: SuffixStore, acceptance: Acceptance, branches: int) -> None:
        super().__init__(store, MAX_MATCH)
        self.context, self.acceptance = context, acceptance
        self.branches = branches if context.trees else 1

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what past outputs went on with, at most `room` deep."""
        self.texts = sequences.here(self.texts)
        lengths, found = [], []
        for row, tokens, most in zip(sequences.rows, sequences.tokens, room, strict=True):
            length, branches = self._found(row, tokens, most)
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


def likely_branches(
    texts: Sequence[Sequence[int]], nodes: int, depth: int, branches: int, min_probability: float
) -> list[list[int]]:
    """Grow a tree from the root, always below the node that most of `texts` pass through, the deepest of equals.

    A text seen once can thus be copied to its end before another one is begun.

    Args:
        texts: continuations seen, the newest first: among equally frequent tokens the newest wins.
        nodes: tokens in the tree at most.
        depth: tokens in a branch at most.
        branches: children of a node at most; 1 gives a chain.
        min_probability: nodes that a smaller share of `texts` passes through are left out.

    Returns:
        The tree's branches from the root to each leaf, the likeliest first.
    """
    leaves: list[list[int]] = []
    # The heap's order: likeliest first, then the deepest, then the one found first.
    heap: list[tuple[int, int, int, list[int], list[Sequence[int]]]] = [(-len(texts), 0, 0, [], list(texts))]
    found = 0
    while heap and found < nodes:
        *_, branch, through = heapq.heappop(heap)
        counts = Counter(text[len(branch)] for text in through if len(text) > len(branch))
        likely = [
            (token, count)
            for token, count in counts.most_common(branches)
            if count >= min_probability * len(texts) and len(branch) < depth
        ][: nodes - found]
        if not likely:
            leaves.append(branch)
        for token, count in likely:
            found += 1
            child = [text for text in through if len(text) > len(branch) and text[len(branch)] == token]
            heapq.heappush(heap, (-count, -len(branch) - 1, found, [*branch, token], child))
    leaves += [branch for *_, branch, _ in sorted(heap)]
    return [leaf for leaf in leaves if leaf]
