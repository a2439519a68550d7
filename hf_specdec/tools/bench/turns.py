"""The turns of a conversation as one measurement: it is one prompt, and prompts are what the bootstrap draws."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import mean
from typing import Any

from .results import Measurement

SUMMED = (
    "tokens",
    "seconds",
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "bare_seconds",
    "target_calls",
    "draft_calls",
    "row_steps",
    "acceptance_sum",
    "acceptance_count",
)
BY_POSITION = ("drafted_per_position", "accepted_per_position")
STEPS = ("target_step_seconds", "draft_step_seconds")


def whole_conversations(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The turns of each prompt put together, by method and repetition, in the order of the first ones."""
    played: dict[tuple[Any, ...], list[Measurement]] = {}
    for m in measurements:
        played.setdefault((*m.unit, m.method, m.repeat), []).append(m)
    return [_together(turns) if len(turns) > 1 else turns[0] for turns in played.values()]


def _together(turns: Sequence[Measurement]) -> Measurement:
    compared = [m.same_text for m in turns if m.same_text is not None]
    differences = (m.difference | {"turn": m.turn} for m in turns if m.difference)
    figures: dict[str, Any] = {name: sum(getattr(m, name) for m in turns) for name in SUMMED}
    figures |= {name: summed_by_position(getattr(m, name) for m in turns) for name in BY_POSITION}
    figures |= {name: _mean_of_known(getattr(m, name) for m in turns) for name in STEPS}
    return replace(
        turns[0],
        **figures,
        same_text=all(compared) if compared else None,
        difference=next(differences, None),
        peak_memory_bytes=max(m.peak_memory_bytes for m in turns),
    )


def summed_by_position(columns: Iterable[Sequence[int]]) -> list[int]:
    """Sums over lists of different lengths, position by position."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
