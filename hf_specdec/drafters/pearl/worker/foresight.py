"""Which corrections of unverified tokens are drafted for: those that are likeliest to be made."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

REMEMBERED = 8
"""tokens per place that may come instead of the drafted one"""
WORTH_A_BRANCH = 0.005
"""chance of a correction above which it is drafted for early, for the target to be fed it; so there are 200 at most"""


@dataclass
class Place:
    """What the draft model thought where it drafted a token."""

    chance: float
    """of the drafted token"""
    others: list[tuple[int, float]]
    """the likeliest other tokens, with their chances"""


class Correction(NamedTuple):
    """What may come instead of a drafted token."""

    chance: float
    """that the target keeps all tokens before it and then wants this one"""
    column: int
    token: int


def corrections(places: Sequence[tuple[int, Place]]) -> list[Correction]:
    """All that are remembered of a row's unverified tokens.

    The draft model's chances stand for the target's; in sampling, where a drawn token is kept with min(1, p/q), they
    are a proxy.

    Args:
        places: with their columns, from the first unverified one on.
    """
    reached, found = 1.0, []
    for column, place in places:
        found += [Correction(reached * chance, column, token) for token, chance in place.others]
        reached *= place.chance
    return found


def likeliest(places: Sequence[tuple[int, Place]], most: int) -> list[Correction]:
    """So many of all places together."""
    return nlargest(most, corrections(places), key=lambda one: one.chance)
