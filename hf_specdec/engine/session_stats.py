"""What a session tells of itself in `DraftContext.stats`, where it may have written anything."""

from numbers import Integral

from ..errors import shortened
from ..stats import SpeculationStats

MOST_NOTES = 8
"""of a session, that are kept"""


def take_over(told: SpeculationStats, stats: SpeculationStats) -> None:
    """Its counts and notes, into the call's statistics."""
    for name in ("draft_calls", "uncorrected_tokens", "window"):
        count = getattr(told, name, 0)
        setattr(stats, name, max(0, int(count)) if isinstance(count, Integral) else 0)
    notes = getattr(told, "notes", None)
    if isinstance(notes, list):
        stats.notes += [shortened(note) for note in notes[:MOST_NOTES] if isinstance(note, str)]
