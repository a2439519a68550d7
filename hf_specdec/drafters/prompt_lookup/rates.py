"""How often copies are right, by the length of the match that they follow."""

from bisect import bisect
from collections.abc import Sequence

from ...budget import Acceptance, Evidence, Tree

LONGER = (12, 16, 24, 32, 48, 64)
"""tokens of a match, from which on it is counted apart: what was copied for long is seldom about to end"""
LONGEST_MATCH = LONGER[-1]


def add_copy(
    tree: Tree,
    copied: Sequence[int],
    match: int,
    max_match: int,
    acceptance: Acceptance,
    branch: int = 0,
    behind: int = -1,
    source: str = "copied",
) -> None:
    """Add what stood behind an earlier occurrence of the last `match` tokens of the path down to `behind`.

    A copied token that was right makes the match longer: the next one is judged by the longer match.
    """
    node = behind
    for i, token in enumerate(copied):
        met = match + i
        length = met if met < max_match else max_match + bisect(LONGER, met)
        evidence = Evidence.of(source, min(branch, 1), length)
        node = acceptance.add(tree, node, token, evidence, guess(met, branch))


def guess(match: int, branch: int = 0) -> float:
    """What is taken for right before anything was measured; a continuation that is not the likeliest is half as
    likely."""
    return match / (match + 2) / (1 + branch)
