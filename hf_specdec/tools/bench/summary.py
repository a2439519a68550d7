"""From measurements to figures: one run per data set, batch size, temperature and method."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import theory
from ...errors import SpeculationError
from ...stats import SpeculationStats
from .methods import PLAIN
from .results import Measurement

CONFIDENCE = 0.95
RESAMPLES = 2000


def check_installed() -> None:
    """Before hours of measuring rather than after.

    Raises:
        SpeculationError: scipy is missing.
    """
    if find_spec("scipy") is None:
        raise SpeculationError("intervals need scipy; pip install 'hf-specdec[bench]'")


def summarize(measurements: Sequence[Measurement], seed: int = 0) -> list[dict[str, Any]]:
    """The `runs` of a result file, in the order in which methods were first measured."""
    cells = dict.fromkeys(map(_cell, measurements))
    return [run for cell in cells for run in _summarize_cell([m for m in measurements if _cell(m) == cell], seed)]


def median_repeats(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Of the repetitions of each prompt, the one of median speed (the slower of two in the middle)."""
    by_prompt: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        by_prompt.setdefault(measurement.prompt, []).append(measurement)
    ranked = (sorted(repeats, key=lambda m: -m.stats.tokens_per_second) for repeats in by_prompt.values())
    return [repeats[len(repeats) // 2] for repeats in ranked]


def speed_ratio(method: Iterable[SpeculationStats], other: Iterable[SpeculationStats]) -> float:
    """Tokens per second of one method over those of another."""
    return total(method).tokens_per_second / total(other).tokens_per_second


def total(stats: Iterable[SpeculationStats]) -> SpeculationStats:
    """Their sum."""
    return sum(stats, SpeculationStats())


def ratio_interval(
    method: Sequence[Measurement], other: Sequence[Measurement], seed: int = 0
) -> tuple[float, float] | None:
    """95% bootstrap interval of the speed ratio, prompts drawn with replacement; None for fewer than 2 prompts.

    Args:
        method: a measurement per prompt.
        other: of the same prompts, in the same order.
    """
    if len(method) < 2:
        return None
    from scipy.stats import bootstrap

    def ratio(t1: Any, s1: Any, t2: Any, s2: Any, axis: int = -1) -> Any:
        return (t1.sum(axis) / s1.sum(axis)) / (t2.sum(axis) / s2.sum(axis))

    names = ("emitted_tokens", "total_seconds")
    columns = [np.array([getattr(m.stats, name) for m in rows]) for rows in (method, other) for name in names]
    result = bootstrap(
        columns,
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _cell(m: Measurement) -> tuple[str, int, float]:
    return m.dataset, m.batch_size, m.temperature


def _summarize_cell(measurements: list[Measurement], seed: int) -> list[dict[str, Any]]:
    """All methods on one data set at one batch size and temperature."""
    names = list(dict.fromkeys(m.method for m in measurements))
    medians = {name: median_repeats(m for m in measurements if m.method == name) for name in names}
    return [
        _run(name, medians, [m for m in measurements if m.method == name], seed) for name in names if medians.get(PLAIN)
    ]


def _run(name: str, medians: dict[str, list[Measurement]], everything: list[Measurement], seed: int) -> dict[str, Any]:
    mine, first = medians[name], medians[name][0]
    summed = {other: total(m.stats for m in rows) for other, rows in medians.items()}
    stats, plain = summed[name], summed[PLAIN]
    ratios = {
        other: {
            "ratio": stats.tokens_per_second / summed[other].tokens_per_second,
            "interval": ratio_interval(mine, rows, seed),
        }
        for other, rows in medians.items()
        if other != name and len(rows) == len(mine)
    }
    speeds = sorted(m.stats.tokens_per_second for m in mine)
    repeats = [[m.stats for m in everything if m.repeat == repeat] for repeat in sorted({m.repeat for m in everything})]
    decode = stats.total_seconds - stats.prefill_seconds
    c = _cost_coefficient(stats, plain, len(medians[PLAIN]))
    gamma = stats.drafted_tokens / stats.row_steps if stats.row_steps else 0.0
    same = [m.same_text for m in everything if m.same_text is not None]
    return {
        "name": name,
        "dataset": first.dataset,
        "batch_size": first.batch_size,
        "temperature": first.temperature,
        "prompts": len(mine),
        "repeats": len(repeats),
        "identical": all(same) if same else None,
        "tokens": stats.emitted_tokens,
        "seconds": stats.total_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_second_spread": [speeds[0], speeds[len(speeds) // 2], speeds[-1]],
        "tokens_per_second_by_repeat": [total(rows).tokens_per_second for rows in repeats],
        "speedup": stats.tokens_per_second / plain.tokens_per_second,
        "speedup_interval": ratios[PLAIN]["interval"] if PLAIN in ratios else None,
        "ratios": ratios,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats.drafted_tokens else None,
        "acceptance_per_position": stats.acceptance_per_position,
        "gamma": gamma,
        "alpha": stats.alpha,
        "c": c,
        "predicted_speedup": _predicted(stats.alpha, c, gamma),
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": decode,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "overhead_seconds": stats.other_seconds,
        "target_calls": stats.target_calls,
        "draft_calls": stats.draft_calls,
        "peak_memory_bytes": max(m.peak_memory_bytes for m in everything),
        "differences": [m.difference | {"prompt": m.prompt} for m in everything if m.difference],
    }


def _cost_coefficient(mine: SpeculationStats, plain: SpeculationStats, prompts: int) -> float | None:
    """c = T_draft / T_target by mean steps, 0 for drafts without a model, None where no step was seen."""
    steps = plain.target_calls - prompts  # one forward of each reads its prompt
    if not mine.draft_calls:
        return 0.0
    if not mine.draft_seconds or not steps or not plain.verify_seconds:
        return None
    return (mine.draft_seconds / mine.draft_calls) / (plain.verify_seconds / steps)


def _predicted(alpha: float | None, c: float | None, gamma: float) -> float | None:
    """Theorem 3.8 at the mean drafted window, or None where nothing was drafted."""
    if alpha is None or c is None:
        return None
    return theory.improvement_factor(min(alpha, 1.0), round(gamma), c)
