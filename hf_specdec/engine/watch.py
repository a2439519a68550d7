"""`Watch`: what a round takes, and what it gave, for the statistics. It stands beside the round, which does without."""

import torch

from ..clock import mark, now
from ..stats import SpeculationStats
from ..target.captures import recording
from ..transfer import waits
from ..verify.trial import Result


class Watch:
    """The clock of one round. It is told when each part is over; what parts took is known when the round's results were
    looked at."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded = recording.steps
        self.began = self.drafted_at = self.launched_at = self.tested_at = mark(device)

    def drafted(self) -> None:
        """The draft was asked for."""
        self.drafted_at = mark(self.device)

    def launched(self) -> None:
        """The forward was asked for."""
        self.launched_at = mark(self.device)

    def tested(self) -> None:
        """The schedule has said what is judged."""
        self.tested_at = mark(self.device)

    def judged(self, beside: bool) -> None:
        """The forward's results were looked at.

        Args:
            beside: whether drafting went on beside the forward: its schedule has waited for both.
        """
        self.over_at = mark(self.device)
        if waits(self.device) and self.over_at.event is None:  # a forward goes on, nobody sees how long
            self.launched_at = self.tested_at = self.tested_at if beside else self.over_at

    @property
    def usual(self) -> bool:
        """Whether its times say anything of others: to record a step takes long, and happens once."""
        return recording.steps == self._recorded

    @property
    def forward_seconds(self) -> float:
        return self.launched_at.since(self.drafted_at)

    @property
    def draft_seconds(self) -> float:
        """For which the target stood still."""
        return self.drafted_at.since(self.began) + self.tested_at.since(self.launched_at)

    def since_forward(self) -> float:
        """Seconds since the schedule's test, or the forward's results where they came later."""
        return now() - (self.over_at if waits(self.device) else self.tested_at).at


def count_forward(stats: SpeculationStats, width: int, seconds: float, drafting: float) -> None:
    """A verification of so many tokens a row took `seconds`; the target waited `drafting` seconds for the draft."""
    stats.target_calls += 1
    stats.verify_widths[width] += 1
    stats.verify_seconds += seconds
    stats.draft_seconds += drafting
    stats.seconds_by_width[width] = stats.seconds_by_width.get(width, 0.0) + seconds


def count_row(stats: SpeculationStats, result: Result, source: str = "") -> None:
    """What a round gave a row.

    Args:
        source: where its draft came from, of a drafter that says so.
    """
    stats.row_steps += 1
    stats.drafted_per_position.update(range(result.drafted))
    if result.drafted:
        accepted = len(result.path)
        stats.accepted_per_position.update(range(accepted))
        stats.rejections += accepted < min(result.drafted, len(result.tokens))
    if source:
        stats.sources[source] += 1
