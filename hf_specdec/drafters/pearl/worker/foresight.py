"""Which corrections of unverified tokens are drafted for: those that are likeliest to be made."""

from collections.abc import Collection, Sequence
from heapq import nlargest

from ..token import DraftToken


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
    for column, drawn in drafted:
        others = zip(drawn.likely, drawn.chances, strict=True)
        found += [(reached * chance, column, token) for token, chance in others if token not in (drawn.token, *banned)]
        reached *= drawn.chance
    return [(column, token) for _, column, token in nlargest(most, found, key=lambda fork: fork[0])]
