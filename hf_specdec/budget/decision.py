"""The decision: how many of the likeliest nodes, and how many more draft steps, give most tokens per second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod, sqrt
from statistics import NormalDist

from .cost import CostView

FORESIGHT = (1, 2, 3, 4, 6, 8, 12, 16)
"""numbers of further steps that are compared"""
LONGEST = FORESIGHT[-1]
"""steps of a round at most"""
MOST_NODES = 64
"""nodes of a row that are verified at most"""
WORTH_IT = 1.03
"""times plain decoding's speed that drafting must promise: what is chosen for looking best is not quite as good"""


@dataclass(frozen=True)
class Advance:
    """How the rows of a batch advance, and so what their tokens are worth."""

    lockstep: bool = False
    """all together: a node counts where it is kept in all of them"""
    length: int = 0
    """tokens per row of a call that ends with its slowest row; 0 where another row takes the place of one that ends"""

    def tokens(self, gained: Sequence[float]) -> float:
        """What all rows gain in a round, from what each does [B]; B where each gains one token.

        Where nobody waits all tokens are worth the same. Else a row that gains g tokens a round has 1 / g rounds to go
        for each: what counts is the mean of those (g's harmonic mean). And of B rows that gain as much the luckless
        one is behind: what it gains in length / g rounds, counts of mean and variance g - 1 each, is as many standard
        deviations short as the least of B normal numbers.
        """
        rows = len(gained)
        if not self.length or rows <= 1:
            return sum(gained)
        g = max(1.0, rows / sum([1 / each for each in gained]))
        return rows * max(1.0, g - _behind(rows) * sqrt((g - 1) * g / self.length))


SUMMED = Advance()


@cache
def _behind(rows: int) -> float:
    """Standard deviations by which the least of so many normal numbers is expected below the mean (Blom 1958)."""
    return NormalDist().inv_cdf((rows - 3 / 8) / (rows + 1 / 4))


def most_per_second(
    rows: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    spent: float = 0.0,
    advance: Advance = SUMMED,
    most: int = MOST_NODES,
    least: int = 0,
) -> tuple[int, float]:
    """The count n with the most tokens, 1 + the chances of a row's n likeliest nodes, per second, T(1 + n) + spent.

    All rows of a batch are as wide as the widest, so they are cut at the same count.

    Args:
        rows: [B][any] chances of a row's nodes to be kept, the likeliest first.
        seconds: T, duration of a round by the width of its forward.
        spent: seconds that the draft has taken or is going to take.
        advance: what the tokens of several rows are worth together.
        most: the largest count.
        least: the smallest, where so many are verified in any case.

    Returns:
        n, which is 0 where none is worth it, and its tokens per second.
    """
    if advance.lockstep and len(rows) > 1:
        rows = [[prod(chances) for chances in zip(*rows, strict=False)]]
    count = min(most, max(map(len, rows), default=0))
    worth = advance.tokens if advance.length and len(rows) > 1 else sum
    gained = [accumulate((*row[:count], *[0.0] * (count - len(row))), initial=1.0) for row in rows]
    speeds = [worth(each) / (seconds(width) + spent) for width, each in enumerate(zip(*gained, strict=True), start=1)]
    least = min(least, count)
    best = max(range(least, len(speeds)), key=speeds.__getitem__)
    best = best if speeds[best] > WORTH_IT * speeds[least] else least
    return best, speeds[best]


def nodes_that_pay(
    chances: Sequence[Sequence[float]],
    rows: int,
    cost: CostView,
    spent: float = 0.0,
    advance: Advance = SUMMED,
    least: int = 0,
) -> int:
    """How many of each row's nodes to verify in a forward of so many rows: those that give most tokens per second, or
    as many as teach what a forward takes; the first `least` in any case, behind which no round is plain, and what is
    free behind those."""
    if (tried := cost.tried(rows)) is None or (least and not tried and cost.known):
        most, least = max(cost.most(rows), least), cost.filled(least)
        return most_per_second(chances, cost.round(rows), spent, advance, max(most, least), least)[0]
    return max(tried, least)


def steps_that_pay(
    rows: Sequence[Sequence[float]],
    onward: Sequence[float],
    alphas: Sequence[float],
    seconds: Callable[[int], float],
    drafting: Callable[[int], float],
    advance: Advance = SUMMED,
    enough: int = LONGEST,
) -> int:
    """How many more steps of a draft model promise most tokens per second; 0 where none pays. Behind nothing it is
    Theorem 3.8 of Leviathan et al. 2023, with measured times.

    Args:
        rows: [B][any] chances of the nodes that are there, the likeliest first.
        onward: [B] the chance that all before the next step's tokens is kept, and that nobody says yet what is right
            there; 0 for a row that drafts no more.
        seconds: T, duration of a round by the width of its forward.
        drafting: seconds that drafting takes by so many more steps; of none what it has taken already.
        advance: as in `most_per_second`.
        enough: no more are counted; 1 where it is asked whether to make another at all.
    """
    there, speed = most_per_second(rows, seconds, spent := drafting(0), advance)
    best, before, speed = 0, 0.0, speed if there or spent else WORTH_IT * speed
    ahead = [alphas[0] ** i * each for i in range(FORESIGHT[-1]) for each in alphas]
    for more in FORESIGHT:
        foreseen = [
            sorted([*row, *[chance * each for each in ahead[: more * len(alphas)] if chance]], reverse=True)
            for row, chance in zip(rows, onward, strict=True)
        ]
        count, found = most_per_second(foreseen, seconds, drafting(more), advance)
        if found > speed:
            best, speed = more, found
        if best >= enough or (count and found < before):  # each further step adds less: past the summit
            break
        before = found if count else 0.0
    return min(best, enough)
