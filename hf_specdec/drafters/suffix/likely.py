"""The likeliest continuations of a match as a tree, by how often each was seen."""

import heapq
from collections import Counter
from collections.abc import Sequence


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
