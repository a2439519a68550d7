"""The decision: how many of the likeliest nodes, and how many more draft steps, give most tokens per second."""

from collections.abc import Callable, Sequence
from math import prod

FORESIGHT = (1, 2, 4, 8)
"""further steps that are thought of before each"""
MOST_NODES = 64
"""nodes of a row that are verified at most"""
WORTH_IT = 1.03
"""times plain decoding's speed that drafting must promise: what is chosen for looking best is not quite as good"""


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
        rows: [B][any] chances of a row's nodes to be kept, the likeliest first.
        seconds: T, duration of a round by the width of its forward.
        spent: seconds that the draft has taken or is going to take.
        lockstep: rows advance together: a node counts where it is kept in all of them.
        most: the largest count.

    Returns:
        n, which is 0 where none is worth it, and its tokens per second.
    """
    if lockstep and len(rows) > 1:
        rows = [[prod(chances) for chances in zip(*rows, strict=False)]]
    plain = len(rows) / (seconds(1) + spent)
    tokens, best, speed = float(len(rows)), 0, WORTH_IT * plain
    longest = max(map(len, rows), default=0)
    for n in range(1, min(most, longest) + 1):
        tokens += sum(chances[n - 1] for chances in rows if len(chances) >= n)
        if tokens / (seconds(n + 1) + spent) > speed:
            best, speed = n, tokens / (seconds(n + 1) + spent)
    return best, speed if best else plain


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
    there, speed = most_per_second(rows, seconds, spent, lockstep)
    best, speed = 0, speed if there or spent else WORTH_IT * speed
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
