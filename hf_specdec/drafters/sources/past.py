"""`Memory`: what past outputs went on with, as nodes of a tree."""

import heapq
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from ...budget import Acceptance, Tree
from ...protocol import DraftContext, Sequences, Verdict
from .copies import Branches, add_copy, cut
from .source import Source
from .store import SuffixStore


class MemoryOptions(Protocol):
    """A config's options for past outputs."""

    max_draft_tokens: int
    tokens_per_match: int
    max_match: int
    min_probability: float
    num_branches: int


class Memory(Source):
    """A store of past outputs, searched by the rows of one call. Each output that ends is added to it."""

    name, kind = "remembered", "suffix"

    def __init__(
        self, context: DraftContext, options: MemoryOptions, store: SuffixStore, acceptance: Acceptance
    ) -> None:
        self.context, self.options, self.store, self.acceptance = context, options, store, acceptance
        self.texts: dict[int, list[int]] = {}
        """by row, its output so far behind the end of its prompt that a match may need; without rows that have ended"""

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        self.texts = sequences.here(self.texts)
        lengths, found = [], []
        for row, tokens, most in zip(sequences.rows, sequences.tokens, room, strict=True):
            length, branches = self._found(row, tokens, most)
            lengths.append(length)
            found.append(branches)
        allowed, longest = cut(found, sequences, self.context), self.options.max_match
        for tree, length, branches in zip(trees, lengths, allowed, strict=True):
            for i, branch in enumerate(branches):
                add_copy(tree, branch, length, longest, self.acceptance, i, source=self.name)

    def _found(self, row: int, tokens: Sequence[int], room: int) -> tuple[int, Branches]:
        """How long the longest match is, and its likeliest continuations."""
        if room < 1:  # also of rows that have ended: what follows there is padding
            return 0, []
        options, longest = self.options, min(self.options.max_draft_tokens, room)
        text = self.texts.setdefault(row, list(tokens[-options.max_match :]))
        past = self.store.continuations(text[-options.max_match :], longest, options.max_match)
        depth = min(longest, options.tokens_per_match * past.length)
        count = options.num_branches if self.context.trees else 1
        nodes = sum(ceil(depth / i) for i in range(1, count + 1))  # a chain's, and some for each other branch
        return past.length, likely_branches(past.tokens, nodes, depth, count, options.min_probability)

    def observe(self, verdict: Verdict) -> None:
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
