"""Which corrections of unverified tokens are drafted for: those that are likeliest to be made."""

from collections.abc import Collection, Sequence
from heapq import nlargest

from ..token import DraftToken

MOST = 8
"""corrections of one token"""


def likeliest(
    drafted: Sequence[tuple[int, DraftToken]], most: int, banned: Collection[int] = ()
) -> list[tuple[int, int]]:
    """The likeliest corrections of a row's unverified tokens, as (column, token).

    A correction is made where the target keeps all tokens before it and then wants another one. The draft model's
    chances stand for the target's; in sampling, where a drawn token is kept with min(1, p/q), they are a proxy.

    Args:
        drafted: with their columns, from the first unverified one on.
        banned: tokens that nothing is drafted behind.
    """
    reached, found = 1.0, []
    for column, (drawn, q, likely, chances) in drafted:
        others = [
            (reached * chance, column, token) for token, chance in zip(likely, chances, strict=True) if chance > 0
        ]
        found += [other for other in others if other[2] != drawn and other[2] not in banned][:MOST]
        reached *= q
    return [(column, token) for _, column, token in nlargest(most, found, key=lambda fork: fork[0])]
