"""`Memory`: what past outputs, and those of the call's other rows, went on with, as nodes of a tree."""

import heapq
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from ...budget import Acceptance, Tree
from ...protocol import DraftContext, Sequences, Verdict
from .copies import Branches, add_copy, cut
from .source import Source
from .store import Continuations, SuffixStore
from .written import Written


class MemoryOptions(Protocol):
    """A config's options for past outputs."""

    max_draft_tokens: int
    tokens_per_match: int
    max_match: int
    min_probability: float
    num_branches: int


class Memory(Source):
    """A store of past outputs, searched by the rows of one call, and what these have written so far. Each output that
    ends is added to the store."""

    name, kind = "remembered", "suffix"

    def __init__(
        self, context: DraftContext, options: MemoryOptions, store: SuffixStore, acceptance: Acceptance
    ) -> None:
        self.context, self.options, self.store, self.acceptance = context, options, store, acceptance
        self.written = Written()
        """each output so far, behind the end of its prompt that a match may need"""

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        for row in self.written.texts.keys() - set(sequences.rows):
            self.written.end(row)
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
        if row not in self.written.texts:
            self.written.extend(row, tokens[-options.max_match :])
        past = self._continuations(row, longest)
        depth = min(longest, options.tokens_per_match * past.length)
        count = options.num_branches if self.context.trees else 1
        nodes = sum(ceil(depth / i) for i in range(1, count + 1))  # a chain's, and some for each other branch
        return past.length, likely_branches(past.tokens, nodes, depth, count, options.min_probability)

    def _continuations(self, row: int, length: int) -> Continuations:
        """What followed the longest match in the store, or in another row; in both where they are equally long."""
        most = self.options.max_match
        past = self.store.continuations(self.written.texts[row][-most:], length, most)
        here = self.written.continuations(row, length, most)
        if here.length == past.length:
            return Continuations(past.length, here.tokens + past.tokens)
        return max(here, past, key=lambda found: found.length)

    def observe(self, verdict: Verdict) -> None:
        for row, tokens, stopped in zip(verdict.rows, verdict.tokens, verdict.stopped, strict=True):
            if row in self.written.texts:
                self.written.extend(row, tokens)
                if stopped:
                    self.store.add(self.written.end(row))

    def close(self) -> None:
        """Add the outputs that have not ended, too."""
        for row in list(self.written.texts):
            self.store.add(self.written.end(row))


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
