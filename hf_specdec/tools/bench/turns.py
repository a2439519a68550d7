"""Measurements put together: the turns of a conversation are one prompt, and prompts are what the bootstrap draws."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import mean
from typing import Any

from .results import Acceptance, Measurement, Times


def whole_conversations(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The turns of each prompt put together, by method and repetition, in the order of the first ones."""
    played: dict[tuple[Any, ...], list[Measurement]] = {}
    for m in measurements:
        played.setdefault((*m.unit, m.method, m.repeat), []).append(m)
    return [_together(turns) if len(turns) > 1 else turns[0] for turns in played.values()]


def _together(turns: Sequence[Measurement]) -> Measurement:
    compared = [m.same_text for m in turns if m.same_text is not None]
    differences = (m.difference | {"turn": m.turn} for m in turns if m.difference)
    return replace(
        turns[0],
        tokens=sum(m.tokens for m in turns),
        times=total_times(m.times for m in turns),
        target_calls=sum(m.target_calls for m in turns),
        acceptance=total_acceptance(m.acceptance for m in turns),
        same_text=all(compared) if compared else None,
        difference=next(differences, None),
        peak_memory_bytes=max(m.peak_memory_bytes for m in turns),
    )


def total_times(parts: Iterable[Times]) -> Times:
    """Sums; of the bare steps the means of those that are known."""
    parts = list(parts)
    return Times(
        seconds=sum(t.seconds for t in parts),
        prefill_seconds=sum(t.prefill_seconds for t in parts),
        draft_seconds=sum(t.draft_seconds for t in parts),
        verify_seconds=sum(t.verify_seconds for t in parts),
        bare_seconds=sum(t.bare_seconds for t in parts),
        target_step_seconds=_mean_of_known(t.target_step_seconds for t in parts),
        draft_step_seconds=_mean_of_known(t.draft_step_seconds for t in parts),
    )


def total_acceptance(parts: Iterable[Acceptance]) -> Acceptance:
    """Sums, position by position where there are several."""
    parts = list(parts)
    return Acceptance(
        draft_calls=sum(a.draft_calls for a in parts),
        row_steps=sum(a.row_steps for a in parts),
        drafted_per_position=_by_position(a.drafted_per_position for a in parts),
        accepted_per_position=_by_position(a.accepted_per_position for a in parts),
        acceptance_sum=sum(a.acceptance_sum for a in parts),
        acceptance_count=sum(a.acceptance_count for a in parts),
    )


def _by_position(columns: Iterable[Sequence[int]]) -> list[int]:
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
