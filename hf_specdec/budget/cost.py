"""`Cost` and `DraftCost`: what a round of the target and the steps of a draft model take, by the clock of the rounds
that happen."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median_low
from typing import NamedTuple

from ..theory import line_through

KEPT = 8
"""times of a figure, which is their lower median: a disturbance only makes a forward slower, and seldom most of them"""
AGREES = 1.1
"""times the shortest, up to which a time is the same"""
TICK = 1e-9
"""seconds of what took none by the clock"""
SELDOM = 48
"""rounds of one kind, plain or drafted, after which one of the other kind is timed: that costs 2% at most"""
FORGOTTEN = 256
"""forwards after which a width that was not met is forgotten: its time was that of a shorter text"""
TRIED = (8, 8, 24, 24, 0, 0)
"""nodes of the first rounds, all rows' together: two widths make a line, a plain round is what they are held against,
and a first forward of its kind is no measure"""
BEYOND = 2
"""times the widest width that was met: nothing is known of wider forwards"""


class Times(NamedTuple):
    """The last times of one figure, in seconds."""

    last: tuple[float, ...] = ()

    def add(self, seconds: float) -> "Times":
        return Times((*self.last, max(seconds, TICK))[-KEPT:])

    @property
    def known(self) -> bool:
        """Whether there are two: a first time of its kind says little, as what it begins takes longer."""
        return len(self.last) > 1

    @property
    def seconds(self) -> float:
        """0 before the first."""
        return median_low(self.last) if self.last else 0.0

    @property
    def least(self) -> float:
        """The shortest, which nothing has disturbed if another one agrees."""
        return min(self.last)

    @property
    def agrees(self) -> bool:
        """Whether another time is about as short as the shortest."""
        return self.known and sorted(self.last)[1] < AGREES * self.least


def padded_to(widths: Sequence[int], width: int) -> int:
    """The next of these widths, the narrowest of which comes first; the width itself where it is above all."""
    place = bisect_left(widths, width)
    return widths[place] if place < len(widths) else width


class Cost:
    """Times of a target's forwards by rows and width, and of what a round takes beside them and drafting. One for all
    that draft for the target, who read it by a `CostView`. What threads read is replaced, never changed.

    Where forwards have a few widths only, those of all narrower ones are padded to the next: further nodes are free as
    far as that, and one more costs as much as all up to the next width.
    """

    def __init__(self) -> None:
        self.widths: tuple[int, ...] = ()
        """of forwards, in tokens per row, the narrowest first; empty where a forward is as wide as what it is fed"""
        self.is_set = False
        """whether its figures stay what they are"""
        self._between: dict[bool, Times] = {}  # with nodes or without
        self._times: dict[tuple[int, int], Times] = {}  # by rows and tokens per row
        self._figures: dict[tuple[int, int], Times] = {}  # those of them that are known
        self._met: dict[tuple[int, int], int] = {}  # forwards before the shape was met last
        self._forwards = self._narrow = 0  # all, and those of one token in a row
        self._wide: dict[int, int] = {}  # by rows, forwards of several tokens in a row
        self._curves: dict[int, Callable[[int], float]] = {}  # by rows, seconds by width

    @classmethod
    def set_to(cls, forwards: Mapping[tuple[int, int], float], between: Mapping[bool, float]) -> "Cost":
        """One that learns nothing.

        Args:
            forwards: seconds by rows and tokens per row.
            between: seconds of a round beside the forward, by whether it has nodes.
        """
        cost = cls()
        cost._figures = {shape: Times((seconds, seconds)) for shape, seconds in forwards.items()}
        cost._between = {kind: Times((seconds,)) for kind, seconds in between.items()}
        cost.is_set = True
        return cost

    def figures(self, rows: int) -> tuple[dict[int, Times], dict[bool, Times]]:
        """What is known of forwards of so many rows, by tokens per row, and between forwards, as of `set_to`."""
        return {width: times for (count, width), times in self._figures.items() if count == rows}, self._between

    def times(self, rows: int, width: int) -> int:
        """How often a forward was timed that was fed so much."""
        return len(self._times.get((rows, self.padded(width)), Times()).last)

    def pads_to(self, widths: Sequence[int]) -> None:
        """Forwards have these widths from now on."""
        if tuple(widths) != self.widths:
            self.widths, self._curves = tuple(widths), {}

    def padded(self, width: int) -> int:
        """The width of a forward that is fed so many tokens per row."""
        return padded_to(self.widths, width)

    def within(self, count: int) -> int:
        """Nodes of the widest forward that is no wider than one of so many, or of the narrowest."""
        return self.widths[max(bisect_right(self.widths, 1 + count) - 1, 0)] - 1 if self.widths else count

    def filled(self, count: int) -> int:
        """Nodes of the same forward, if there are so many at least."""
        return self.padded(1 + count) - 1

    def observe_forward(self, rows: int, width: int, seconds: float) -> None:
        """A forward that was fed `width` tokens per row took this long."""
        if self.is_set:
            return
        shape, self._forwards = (rows, self.padded(width)), self._forwards + 1
        self._narrow = self._narrow + 1 if width == 1 else 0
        self._wide = self._wide | {rows: self._wide.get(rows, 0) + 1 if width > 1 else 0}
        met = self._met | {shape: self._forwards}
        self._met = {known: at for known, at in met.items() if self._forwards - at < FORGOTTEN}
        times = self._times | {shape: self._times.get(shape, Times()).add(seconds)}
        self._times, self._curves = {known: times[known] for known in self._met}, {}
        self._figures = {shape: known for shape, known in self._times.items() if known.known}

    def observe_between(self, width: int, seconds: float) -> None:
        """So much of a round with a forward of this width was neither drafting nor the forward."""
        if self.is_set:
            return
        before = self._between.get(width > 1, Times())
        self._between, self._curves = self._between | {width > 1: before.add(max(seconds, 0.0))}, {}

    @property
    def known(self) -> bool:
        """Whether anything can be said of forwards."""
        return bool(self._figures)

    def tried(self, rows: int) -> int | None:
        """Nodes per row to verify in this round to learn what it takes: some at first, one where there were none for
        long, 0 where there were some for long. None: as many as pay."""
        figures = self._figures
        if self.is_set:
            return None
        if self._forwards < len(TRIED) or len(figures) < 2:
            count = TRIED[self._forwards % len(TRIED)] // rows or int((rows, self.padded(1)) in figures)
            return self.filled(count) if count else 0
        if self._narrow >= SELDOM:
            return self.filled(1)
        wide = self._wide.get(rows, 0)  # asked once each: rows of uneven lengths make no narrow forward
        return 0 if wide and wide % SELDOM == 0 else None

    def most(self, rows: int) -> int:
        """Nodes of a row that may be verified: two widths that are close say little of a much wider one."""
        figures = self._figures
        mine = [width for count, width in figures if count == rows]
        widest = max(mine) if len(mine) > 1 else max((n * width for n, width in figures), default=0) // rows
        return self.within(max(BEYOND * widest - 1, 0))

    def round(self, rows: int) -> Callable[[int], float]:
        """Seconds of a round of so many rows by the tokens per row that its forward is fed, without drafting.

        A width's own figure, or else the line through the widths of as many rows. A single token is no part of that:
        the second may cost more than all that follow. Where two widths have not been met, the line by the tokens of all
        rows together.
        """
        curves = self._curves  # read before the times: what is old goes where old ones are
        if rows not in curves:
            curves[rows] = cache(self._curve(rows))
        return curves[rows]

    def _curve(self, rows: int) -> Callable[[int], float]:
        figures, between = self._figures, self._between
        plain, drafted = (between.get(kind, between.get(not kind, Times())).seconds for kind in (False, True))
        mine = {width: times for (count, width), times in figures.items() if count == rows}
        if len(mine) < 2:
            line = _line({count * width: times for (count, width), times in figures.items()})
            return lambda width: (drafted if width > 1 else plain) + line(rows * self.padded(width))
        wide = {width: times for width, times in mine.items() if width > 1}
        line = _line(wide if len(wide) > 1 else mine)

        def seconds(width: int) -> float:
            padded = self.padded(width)
            return (drafted if width > 1 else plain) + (mine[padded].seconds if padded in mine else line(padded))

        return seconds


class CostView:
    """A `Cost` as a drafter sees it: always up to date, and only to be read.

    The drafter asks by the number of its own rows. Others may draft for themselves in the same forwards; the view adds
    those. It has slots and no `__dict__`, so that what a session does to its context does not reach the engine's times.
    """

    __slots__ = ("_cost", "beside")

    def __init__(self, cost: Cost, beside: int = 0) -> None:
        """
        Args:
            beside: how many other rows the present round's forward has; the engine says so before each draft.
        """
        self._cost, self.beside = cost, beside

    @property
    def known(self) -> bool:
        """As `Cost.known`."""
        return self._cost.known

    @property
    def is_set(self) -> bool:
        """As `Cost.is_set`."""
        return self._cost.is_set

    @property
    def widths(self) -> tuple[int, ...]:
        """As `Cost.widths`."""
        return self._cost.widths

    def filled(self, count: int) -> int:
        """As `Cost.filled`."""
        return self._cost.filled(count)

    def tried(self, rows: int) -> int | None:
        """As `Cost.tried`."""
        return self._cost.tried(rows + self.beside)

    def most(self, rows: int) -> int:
        """As `Cost.most`."""
        return self._cost.most(rows + self.beside)

    def round(self, rows: int) -> Callable[[int], float]:
        """As `Cost.round`."""
        return self._cost.round(rows + self.beside)


def _line(known: Mapping[int, Times]) -> Callable[[int], float]:
    """Through figures, each as often as it was measured."""
    weights = {n: float(len(times.last)) for n, times in known.items()}
    return line_through({n: times.seconds for n, times in known.items()}, weights)


class DraftCost:
    """What a draft model takes, in seconds."""

    def __init__(self) -> None:
        self._steps, self._openings = Times(), Times()
        self.is_set = False
        """as of `Cost`"""
        self.enough = 2
        """times of a step, before which it is not known"""
        self.reading = 0.0
        """per token of a text that it has not read; the least that was measured, as short texts take longer per
        token"""

    @property
    def step(self) -> float | None:
        """Of each further token; None before that is known."""
        return self._steps.seconds if self.is_set or len(self._steps.last) >= self.enough else None

    def set_to(self, step: float, opening: float, reading: float) -> None:
        """These figures stay."""
        self._steps, self._openings, self.reading, self.is_set = Times((step,)), Times((opening,)), reading, True

    @property
    def least(self) -> float | None:
        """Of the steps the shortest, with `step` None as well."""
        return None if self.step is None else self._steps.least

    @property
    def opening(self) -> float:
        """That a round with any steps takes beside them: what was accepted meanwhile is read."""
        return self._openings.seconds

    def observe(self, steps: int, first: float, seconds: float, usual: bool = True) -> None:
        """A round drafted so many steps in `seconds`; the first one was there after `first`.

        Args:
            usual: whether that read no more than what the round before had added.
        """
        if self.is_set:
            return
        each = (seconds - first) / (steps - 1) if steps > 1 else first
        if steps > 1 or self.step is None or each < self.step:
            self._steps = self._steps.add(each)
        opening = max(first - self._steps.seconds, 0.0)
        if usual or opening < self.opening:  # what reads more takes no less
            self._openings = self._openings.add(opening)

    def observe_reading(self, seconds: float, tokens: int) -> None:
        """So many tokens were read in this time."""
        if tokens and not self.is_set:
            self.reading = min(self.reading or seconds / tokens, seconds / tokens)

    def of(self, steps: int) -> float:
        """Seconds of a draft of so many steps, as far as is known."""
        return self.opening + steps * self._steps.seconds if steps else 0.0

    def c(self, cost: CostView, rows: int) -> float | None:
        """A draft of one step over a step of the target; None where one of them is not known yet."""
        return (self.opening + self.step) / cost.round(rows)(1) if self.step is not None and cost.known else None
