"""Which corrections of unverified tokens are drafted for: those that are likeliest to be made."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

REMEMBERED = 8
"""tokens per place that may come instead of the drafted one"""


@dataclass
class Place:
    """What the draft model thought where it drafted a token."""

    chance: float
    """of the drafted token"""
    others: list[tuple[int, float]]
    """the likeliest other tokens, with their chances"""


def likeliest(places: Sequence[tuple[int, Place]], most: int) -> list[tuple[int, int]]:
    """The likeliest corrections of a row's unverified tokens, as (column, token).

    A correction is made where the target keeps all tokens before it and then wants another one. The draft model's
    chances stand for the target's; in sampling, where a drawn token is kept with min(1, p/q), they are a proxy.

    Args:
        places: with their columns, from the first unverified one on.
    """
    reached, found = 1.0, []
    for column, place in places:
        found += [(reached * chance, column, token) for token, chance in place.others]
        reached *= place.chance
    return [(column, token) for _, column, token in nlargest(most, found, key=lambda fork: fork[0])]
