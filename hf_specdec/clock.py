"""The one clock. Whatever depends on time reads it: what a forward takes, whether a draft pays, how a trial went.

`use` replaces it, so that decisions can be played on set times. How long somebody else is waited for is no such
decision: that is `real` time whatever the clock says, or a clock that stands still would wait for ever.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_read: Callable[[], float] = time.perf_counter

SPIN_SECONDS = 0.0003
"""The system wakes a sleeper up to this late, so the last bit of a wait is spun."""


def now() -> float:
    """Seconds since some moment that all processes of a machine share."""
    return _read()


def real() -> float:
    """Seconds of real time, whatever the clock says: of how long somebody else is waited for."""
    return time.perf_counter()


def nap() -> None:
    """Let others work for a while."""
    time.sleep(1e-4)


@contextmanager
def use(read: Callable[[], float]) -> Iterator[None]:
    """Inside the block `now` is what `read` says, in all threads of this process."""
    global _read
    before, _read = _read, read
    try:
        yield
    finally:
        _read = before


class Moment(NamedTuple):
    """When something was asked for, and on a GPU when the device gets there."""

    at: float
    """seconds, of `now`"""
    event: Any = None
    """of the device"""

    def since(self, earlier: "Moment") -> float:
        """Seconds between the two, on the device where it was asked for both. The device has got there."""
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event)) / 1e3
        return self.at - earlier.at


def mark(device: "torch.device") -> Moment:
    """This moment in the work of a device."""
    if device.type != "cuda":
        return Moment(now())
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Moment(now(), event)


class Deadline:
    """So many seconds of real time from now."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = real(), seconds

    @property
    def left(self) -> float:
        """Seconds to go; 0 where it is over."""
        return max(0.0, self._seconds - (real() - self._began))

    @property
    def over(self) -> bool:
        """True of NaN seconds, too."""
        return not real() - self._began <= self._seconds

    def sleep(self) -> None:
        """Until it is over, to within a few microseconds."""
        while (left := self.left) > 0:
            time.sleep(left - SPIN_SECONDS if left > SPIN_SECONDS else 0)
