"""`Cost`: what the parts of a round take, measured in the rounds that happen."""

from collections.abc import Callable, Mapping
from functools import cache
from math import inf

from ..theory import line_through

FADES = 0.99
"""weight of the past at each forward: times of long ago were those of a shorter text"""
FAINT = 0.3
"""weight below which a width is forgotten"""
TRIED = (8, 8, 24, 24, 3, 3)
"""nodes of the first rounds, all rows' together, to learn what width costs: each twice, as a first forward does not
count. Where rows are many that makes plain rounds, and narrow ones: a wide forward of theirs takes long"""
AGAIN = 32
"""forwards of a single token in a row, behind which two are tried: what wider ones took may have been disturbed"""
FOLLOWS, DISTURBED, OUTLIER, AT_MOST = 0.15, 0.05, 1.3, 4.0
"""weights of a new time in a running figure, and of one that is so many times as long, which counts as so many times at
most"""
PLAIN, LOOK = 48, 8
"""forwards of several tokens one after another, of as many rows, behind which a plain round is played, as all that
drafts gain is counted from it; and where its time is not known, or doubted"""
DOUBTED, FASTER = 3.0, 0.95
"""weight below which a plain round's time is doubted if a wider one is said to take less than this share of it"""
LINE = 4.0
"""forwards that the line through all widths counts as, beside those of a width itself"""
BEYOND = 2
"""times as wide as the widest that was met, what a forward may be"""
UNKNOWN = 8
"""nodes while too little is known of widths"""


class Cost:
    """Times of a target's forwards by rows and width, and of what a round takes beside them and drafting. One for all
    that draft for the target."""

    def __init__(self) -> None:
        self.beside = 0
        """rows in the same forwards that draft for themselves: whoever asks does not count them"""
        self._between: dict[bool, float] = {}  # without nodes, and with some → seconds
        self._times: dict[tuple[int, int], tuple[float, float]] = {}  # rows, tokens per row → seconds, weight
        self._met: set[tuple[int, int]] = set()
        self._rounds = self._narrow = 0  # forwards, and those of one token in a row
        self._wide: dict[int, int] = {}  # rows → forwards of several tokens in a row
        self._curves: dict[int, Callable[[int], float]] = {}  # rows → seconds by width, of the present times

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_curves": {}}  # functions, which cannot be sent

    def copy(self, beside: int = 0) -> "Cost":
        """For those who may write into it, beside so many other rows."""
        copied = Cost()
        copied.beside = self.beside + beside
        copied._between, copied._times = dict(self._between), dict(self._times)
        copied._met, copied._wide = set(self._met), dict(self._wide)
        copied._rounds, copied._narrow = self._rounds, self._narrow
        return copied

    def observe_forward(self, rows: int, width: int, seconds: float) -> None:
        """A first forward of its shape takes longer than those that follow: it does not count."""
        self._rounds, self._narrow = self._rounds + 1, self._narrow + 1 if width == 1 else 0
        self._wide = self._wide | {rows: self._wide.get(rows, 0) + 1 if width > 1 else 0}
        shape = rows, width
        if shape not in self._met:
            self._met.add(shape)
            return
        faded = {known: (t, FADES * weight) for known, (t, weight) in self._times.items() if weight > FAINT}
        before, weight = faded.get(shape, (None, 0.0))
        self._times = faded | {shape: (running_mean(before, seconds, weight), weight + 1)}
        self._curves = {}

    def observe_between(self, width: int, seconds: float) -> None:
        """So much of a round with a forward of this width was neither drafting nor the forward."""
        drafted = width > 1
        self._between = self._between | {drafted: running_mean(self._between.get(drafted), max(seconds, 0.0))}
        self._curves = {}

    @property
    def known(self) -> bool:
        """Whether anything can be said of forwards."""
        return bool(self._times)

    def tried(self, rows: int) -> int | None:
        """Nodes per row to try next: while widths are still to be learned, where none was verified for long, and 0
        where something was in all rounds for long; else None."""
        rounds, times, rows = self._rounds, self._times, rows + self.beside  # read once: threads share it
        if rounds < len(TRIED):
            return TRIED[rounds] // rows
        if len(times) < 2:
            return UNKNOWN // rows or int((rows, 1) in times)
        if self._narrow >= AGAIN:
            return 1
        wide = self._wide.get(rows, 0)  # asked once each: where rows are staggered a plain round is no narrow forward
        return 0 if wide and wide % (LOOK if _doubted(times, rows) else PLAIN) == 0 else None

    def most(self, rows: int) -> int:
        """Nodes of a row that may be verified: two widths that are close say little of a much wider one."""
        times, rows = self._times, rows + self.beside
        mine = [width for count, width in times if count == rows]
        widest = max(mine) if len(mine) > 1 else max((n * width for n, width in times), default=0) // rows
        return max(BEYOND * widest - 1, 0)

    def round(self, rows: int) -> Callable[[int], float]:
        """Seconds of a round of so many rows by the width of its forward, without drafting.

        The line through what was measured of as many rows, drawn to the width's own figure the more often it was met;
        a single token has its own alone, once it was met (the second may cost more than all that follow). Where two
        widths have not been met yet, the line by the tokens of all rows together.
        """
        curves, rows = self._curves, rows + self.beside  # read before the times: what is old goes where old ones are
        if rows not in curves:
            curves[rows] = cache(self._curve(rows))
        return curves[rows]

    def _curve(self, rows: int) -> Callable[[int], float]:
        times = self._times
        plain, drafted = (self._between.get(kind, self._between.get(not kind, 0.0)) for kind in (False, True))
        mine = {width: known for (count, width), known in times.items() if count == rows}
        if len(mine) < 2:
            line = _line({count * width: known for (count, width), known in times.items()})
            return lambda width: (drafted if width > 1 else plain) + line(rows * width)
        wide = {width: known for width, known in mine.items() if width > 1}
        line = _line(wide if len(wide) > 1 else mine)

        def seconds(width: int) -> float:
            own, weight = mine.get(width, (0.0, 0.0))
            if width == 1 and weight:
                return own
            return (weight * own + LINE * line(width)) / (weight + LINE)

        return lambda width: (drafted if width > 1 else plain) + seconds(width)


def _doubted(times: Mapping[tuple[int, int], tuple[float, float]], rows: int) -> bool:
    """Whether it is not known what a forward of one token takes: not met, or seldom of late, and faster if wider."""
    seconds, weight = times.get((rows, 1), (inf, 0.0))
    faster = any(t < FASTER * seconds for (count, _), (t, _) in times.items() if count == rows)
    return weight == 0 or (weight < DOUBTED and faster)


def _line(known: Mapping[int, tuple[float, float]]) -> Callable[[int], float]:
    """Through times with their weights."""
    return line_through({n: t for n, (t, _) in known.items()}, {n: weight for n, (_, weight) in known.items()})


def running_mean(old: float | None, new: float, weight: float = inf) -> float:
    """A running figure that a disturbance moves little, and not for long: it only ever makes a forward slower.

    Args:
        weight: of the old figure; where that is little, because few times or old ones are in it, the new time has more.
    """
    if not old or new * OUTLIER < old:
        return new
    follows = FOLLOWS if new < OUTLIER * old else DISTURBED
    return old + max(follows, follows / FOLLOWS / (1 + weight)) * (min(new, AT_MOST * old) - old)
