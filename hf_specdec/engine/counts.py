"""Statistics of rounds, of a decoder and of each of its answers."""

from ..stats import SpeculationStats
from .shares import Result


def count_forward(stats: SpeculationStats, width: int, seconds: float, drafting: float) -> None:
    """A verification of so many tokens a row took `seconds`; the draft before it took `drafting`."""
    stats.target_calls += 1
    stats.verify_widths[width] += 1
    stats.verify_seconds += seconds
    stats.draft_seconds += drafting
    stats.seconds_by_width[width] = stats.seconds_by_width.get(width, 0.0) + seconds


def count_row(stats: SpeculationStats, result: Result) -> None:
    """What it gave a row."""
    stats.row_steps += 1
    stats.emitted_tokens += len(result.tokens)
    stats.drafted_per_position.update(range(result.drafted))
    stats.accepted_per_position.update(range(len(result.path)))
