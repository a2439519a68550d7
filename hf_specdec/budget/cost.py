"""`Cost`: what the parts of a round take, measured in the rounds that happen."""

from collections.abc import Callable

from ..theory import line_through

FADES = 0.99
"""weight of the past at each forward: times of long ago were those of a shorter text"""
FAINT = 0.05
"""weight below which a width is forgotten"""
TRIED = (8, 8, 24, 24, 3, 3)
"""nodes of the first rounds, to learn what width costs: each twice, as a first forward does not count"""
UNKNOWN = 8
"""nodes while too little is known of widths"""


class Cost:
    """Times of verification forwards by width, of draft steps, and of what lies between."""

    def __init__(self) -> None:
        self.rows = 1
        """of the batch"""
        self.draft_step: float | None = None
        """seconds"""
        self._between: float | None = None
        self.unasked = 0
        """rounds since the draft model was asked last"""
        self._widths: dict[int, tuple[float, float]] = {}  # tokens per row → seconds, weight
        self._met: set[int] = set()
        self._rounds = 0

    def observe_forward(self, width: int, seconds: float) -> None:
        """A first forward of its width takes longer than those that follow: it does not count."""
        self._rounds += 1
        if width not in self._met:
            self._met.add(width)
            return
        faded = {w: (t, FADES * weight) for w, (t, weight) in self._widths.items() if weight > FAINT}
        before, weight = faded.get(width, (None, 0.0))
        self._widths = faded | {width: (running_mean(before, seconds), weight + 1)}

    def observe_step(self, seconds: float) -> None:
        """One draft step took this long."""
        self.draft_step = running_mean(self.draft_step, seconds)

    def observe_between(self, seconds: float) -> None:
        """So much of a round was neither drafting nor the forward."""
        self._between = running_mean(self._between, max(seconds, 0.0))

    @property
    def known(self) -> bool:
        """Whether anything can be said of forwards."""
        return bool(self._widths)

    @property
    def tried(self) -> int | None:
        """Nodes per row to try next, while widths are still to be learned; None when that is done."""
        rounds = self._rounds  # read once: threads share it
        if rounds < len(TRIED):
            return max(1, TRIED[rounds] // self.rows)
        return None if len(self._widths) > 1 else max(1, UNKNOWN // self.rows)

    def round(self) -> Callable[[int], float]:
        """Seconds of a round by the width of its forward, without drafting."""
        widths = self._widths
        between = self._between or 0.0
        line = line_through({w: t for w, (t, _) in widths.items()}, {w: weight for w, (_, weight) in widths.items()})
        return lambda width: between + line(width)


def running_mean(old: float | None, new: float) -> float:
    """A running figure near the low end: what disturbs a machine only ever makes a forward slower."""
    if old is None:
        return new
    return old + (0.3 if new < old else 0.05) * (new - old)
