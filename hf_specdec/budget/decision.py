"""The decision: how many of the likeliest nodes, and how many more draft steps, give most tokens per second."""

from collections.abc import Callable, Sequence
from math import exp, prod

FORESIGHT = (1, 2, 4, 8)
"""further steps that are thought of before each"""
MOST_NODES = 64
"""nodes of a row that are verified at most"""
FORGIVING = 8
"""of what is left to write, the share by which rows may differ that are waited for alike"""


def worths(rooms: Sequence[int], own: float = 0.0) -> list[float]:
    """What a token of each row is worth in a batch that ends with its last row; 1 on average.

    The row with most left to write is waited for, and tokens of those ahead of it shorten only their own part of the
    rounds. Far from the end that says little, as texts may end by themselves: a lead counts in proportion to what is
    left.

    Args:
        rooms: [B] tokens that each row may still write.
        own: of a round's time the share that its rows take each for itself, from 0 to 1; the rest they have in common.
    """
    most = max(rooms, default=0)
    waited = [exp(FORGIVING * (room / most - 1)) if most > 0 else 1.0 for room in rooms]
    mean = sum(waited) / max(1, len(waited))
    return [own + (1 - own) * each / mean for each in waited]


def weighted(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """Each row's chances times what its tokens are worth."""
    return [[weight * chance for chance in row] for row, weight in zip(rows, weights, strict=True)]


def most_per_second(
    rows: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    spent: float = 0.0,
    lockstep: bool = False,
    most: int = MOST_NODES,
) -> tuple[int, float]:
    """The count n with the highest (Σ over rows of 1 + the chances of its n likeliest nodes) / (T(1 + n) + spent).

    All rows of a batch are as wide as the widest, so they are cut at the same count.

    Args:
        rows: [B][any] chances of a row's nodes to be kept, the likeliest first; times what a token of the row is worth,
            where they are not alike.
        seconds: T, duration of a round by the width of its forward.
        spent: seconds that the draft has taken or is going to take.
        lockstep: rows advance together: a node counts where it is kept in all of them.
        most: the largest count.

    Returns:
        n, which may be 0, and its tokens per second.
    """
    if lockstep and len(rows) > 1:
        rows = [[prod(chances) for chances in zip(*rows, strict=False)]]
    tokens, best, speed = float(len(rows)), 0, len(rows) / (seconds(1) + spent)
    longest = max(map(len, rows), default=0)
    for n in range(1, min(most, longest) + 1):
        tokens += sum(chances[n - 1] for chances in rows if len(chances) >= n)
        if tokens / (seconds(n + 1) + spent) > speed:
            best, speed = n, tokens / (seconds(n + 1) + spent)
    return best, speed


def steps_that_pay(
    rows: Sequence[Sequence[float]],
    onward: Sequence[float],
    likely: Sequence[float],
    seconds: Callable[[int], float],
    step: float,
    spent: float = 0.0,
    lockstep: bool = False,
    opening: float = 0.0,
) -> int:
    """How many more steps of a draft model promise most tokens per second; 0 where none pays.

    Args:
        rows: [B][any] chances of the nodes that are there, the likeliest first.
        onward: [B] the chance that all before the next step's tokens is kept; 0 for a row that drafts no more.
        likely: of each of a step's candidates, the chance to be right where all before it is. A row goes on from the
            first.
        seconds: T, duration of a round by the width of its forward.
        step: seconds of a draft step.
        spent: seconds that drafting has taken already.
        lockstep: as in `most_per_second`.
        opening: seconds that the first of them takes beside its own.
    """
    best, speed = 0, most_per_second(rows, seconds, spent, lockstep)[1]
    for more in FORESIGHT:
        foreseen = [
            sorted(
                [*row, *(chance * likely[0] ** i * each for i in range(more if chance else 0) for each in likely)],
                reverse=True,
            )
            for row, chance in zip(rows, onward, strict=True)
        ]
        found = most_per_second(foreseen, seconds, spent + opening + more * step, lockstep)[1]
        if found > speed:
            best, speed = more, found
    return best
