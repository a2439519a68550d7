"""`Watch`: what a round takes, and what it gave, for the statistics. It stands beside the round, which does without."""

import torch

from ..clock import mark, now
from ..stats import SpeculationStats
from ..target.recorded import first_runs
from ..transfer import waits
from ..verify.trial import Result


class Watch:
    """The clock of one round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded = first_runs()
        self._marks = [mark(device)]
        self.forward_seconds = self.draft_seconds = 0.0
        """known once the forward was judged; the latter are those for which the target stood still"""

    def lap(self) -> None:
        """A part of the round was asked for: the draft, the forward, what the schedule says is judged."""
        self._marks.append(mark(self.device))

    def judged(self, beside: bool) -> None:
        """The forward's results were looked at.

        Args:
            beside: whether drafting went on beside the forward: its schedule has waited for both.
        """
        began, drafted, launched, tested = self._marks
        over = mark(self.device)
        if waits(self.device) and over.event is None:  # a forward goes on, nobody sees how long
            launched = tested = tested if beside else over
        self.forward_seconds = launched.since(drafted)
        self.draft_seconds = drafted.since(began) + tested.since(launched)
        self._free = over if waits(self.device) else tested

    @property
    def usual(self) -> bool:
        """Whether its times say anything of others: what was not replayed takes long, and happens once."""
        return first_runs() == self._recorded

    def since_forward(self) -> float:
        """Seconds since the schedule's test, or the forward's results where they came later."""
        return now() - self._free.at


def count_forward(stats: SpeculationStats, width: int, seconds: float, drafting: float) -> None:
    """A verification of so many tokens a row took `seconds`; the target waited `drafting` seconds for the draft."""
    stats.target_calls += 1
    stats.verify_widths[width] += 1
    stats.verify_seconds += seconds
    stats.draft_seconds += drafting
    stats.seconds_by_width[width] = stats.seconds_by_width.get(width, 0.0) + seconds


def count_row(stats: SpeculationStats, result: Result, active: bool, source: str = "") -> None:
    """What a round gave a row.

    Args:
        active: whether it was not finished before.
        source: where its draft came from, of a drafter that says so.
    """
    stats.emitted_tokens += result.emitted
    if not active:
        return
    stats.row_steps += 1
    stats.drafted_per_position.update(range(result.drafted))
    if result.drafted:
        accepted = len(result.path)
        stats.accepted_per_position.update(range(accepted))
        stats.rejections += accepted < min(result.drafted, len(result.tokens))
    if source:
        stats.sources[source] += 1
