"""What was accepted lately, counted as if each schedule had decoded it.

The formulas of `theory` take acceptances for independent. Real ones come in bursts, which suit one schedule and not the
other at the same acceptance rate; so the schedules are compared on the text itself.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

BEFORE = (0, 0, 1, 2, 3, 4, 6, 8)
"""runs that are taken to have been seen before any were: independent acceptances of 3 in 4"""
MEMORY = 128
"""runs"""
LONGEST = 100
"""longer runs count as this long, so that one endless text does not outweigh all that follow"""
FORESEEN = (1.0, 4.0)
"""of so many corrections so many are taken to have been drafted for, until some were seen"""
FORGETTING = 0.98
"""of corrections, per round that made some"""

Runs = NDArray[np.int64]
"""[N] accepted tokens before each correction"""


class History:
    """Remembers runs of accepted tokens, and how many corrections were foreseen."""

    def __init__(self) -> None:
        self.ended: deque[int] = deque(BEFORE, maxlen=MEMORY)
        self.unbroken: dict[int, int] = {}
        """by row, accepted tokens since its last correction"""
        self.hits, self.corrections = FORESEEN

    def saw_tests(self, rows: Sequence[int], tested: Sequence[int], accepted: Sequence[int]) -> None:
        """Per row, of so many drafted tokens so many leading ones were accepted."""
        for row, of, n in zip(rows, tested, accepted, strict=True):
            run = self.unbroken.pop(row, 0) + n
            if n < of:
                self.ended.append(run)
            elif run:
                self.unbroken[row] = run

    def end_texts(self) -> None:
        """The rows to come are others; a text's end ends its run."""
        self.ended.extend(dict(self.unbroken).values())
        self.unbroken.clear()

    def saw_corrections(self, made: int, foreseen: int) -> None:
        if made:  # rounds without corrections say nothing, however many they are
            self.hits = FORGETTING * self.hits + foreseen
            self.corrections = FORGETTING * self.corrections + made

    @property
    def foreseen(self) -> float:
        """Share of corrections that were drafted for, where there was drafting for them."""
        return self.hits / self.corrections

    @property
    def acceptance(self) -> float:
        """Share of the tested tokens that were accepted."""
        accepted = int(self.runs.sum())
        return accepted / (accepted + len(self.ended))

    @property
    def runs(self) -> Runs:
        return np.minimum([*self.ended.copy(), *dict(self.unbroken).values()], LONGEST)  # two calls may run at once


def serial_speeds(
    runs: Runs, windows: Sequence[int], target_seconds: Callable[[int], float], draft_seconds: float
) -> list[float]:
    """Tokens per second of serial decoding at each window: a round takes γ accepted tokens and one of the target's.

    Args:
        target_seconds: duration of a target forward by its width in tokens.
        draft_seconds: duration of a draft step.
    """
    tokens = float((runs + 1).sum())
    rounds = (runs[:, None] // (np.array(windows) + 1) + 1).sum(0).tolist()
    seconds = [target_seconds(gamma + 1) + gamma * draft_seconds for gamma in windows]
    return [tokens / (n * each) for n, each in zip(rounds, seconds, strict=True)]


def overlapped_speeds(
    runs: Runs,
    windows: Sequence[int],
    target_seconds: Callable[[int], float],
    draft_seconds: float,
    foreseen: float = 0.0,
) -> list[float]:
    """Tokens per second of Figure 3's schedule at each window: a round that accepts all waits for γ draft steps, one
    that rejects does not, unless its correction was foreseen. After a correction x1 is tested alone, unless that was
    foreseen.

    Args:
        target_seconds, draft_seconds: as in `serial_speeds`; a forward is γ tokens wide.
        foreseen: share of corrections that were drafted for.
    """
    tokens, gammas = float((runs + 1).sum()), np.array(windows)
    anew, on = (-(-runs[:, None] // gammas)).sum(0), (runs[:, None] // gammas).sum(0)
    passes = ((1 - foreseen) * anew + foreseen * on).tolist()
    speeds = []
    for gamma, passed in zip(windows, passes, strict=True):
        verify = target_seconds(gamma)
        whole, short = max(verify, gamma * draft_seconds), max(verify, draft_seconds)
        rejected = foreseen * whole + (1 - foreseen) * short
        speeds.append(tokens / (passed * whole + len(runs) * rejected))
    return speeds
