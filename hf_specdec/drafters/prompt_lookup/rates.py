"""How often copies are right, by the length of the match that they follow."""

from collections.abc import Sequence

from ...budget import Survival, Tree


def add_copy(
    tree: Tree,
    copied: Sequence[int],
    match: int,
    max_match: int,
    survival: Survival,
    branch: int = 0,
    behind: int = -1,
    source: str = "copied",
) -> None:
    """Add what stood behind an earlier occurrence of the last `match` tokens of the path down to `behind`.

    A copied token that was right makes the match longer: the next one is judged by the longer match.
    """
    node = behind
    for i, token in enumerate(copied):
        kind = (source, min(match + i, max_match), min(branch, 1))
        node = survival.add(tree, node, token, kind, guess(match + i, branch))


def guess(match: int, branch: int = 0) -> float:
    """What is taken for right before anything was measured; a continuation that is not the likeliest is half as
    likely."""
    return match / (match + 2) / (1 + branch)
