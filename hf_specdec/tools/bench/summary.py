"""From measurements to figures: one run per data set, batch size, temperature and method."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import theory
from ...errors import SpeculationError
from .methods import PLAIN
from .results import Counts, Measurement

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
    ranked = (sorted(repeats, key=lambda m: m.seconds / max(m.tokens, 1)) for repeats in by_prompt.values())
    return [repeats[len(repeats) // 2] for repeats in ranked]


def speed_ratio(method: Iterable[Counts], other: Iterable[Counts]) -> float:
    """Tokens per second of one method over those of another."""
    return _speed(method) / _speed(other)


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

    columns = [np.array([getattr(m, name) for m in rows]) for rows in (method, other) for name in ("tokens", "seconds")]
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
    mine, plain = medians[name], sum(medians[PLAIN], Counts())
    ratios = {
        other: {"ratio": speed_ratio(mine, rows), "interval": ratio_interval(mine, rows, seed)}
        for other, rows in medians.items()
        if other != name and len(rows) == len(mine)
    }
    speeds = sorted(m.tokens / m.seconds for m in mine)
    repeats = [[m for m in everything if m.repeat == repeat] for repeat in sorted({m.repeat for m in everything})]
    total = sum(mine, Counts())
    decode = total.seconds - total.prefill_seconds
    drafted, accepted = total.drafted_per_position, total.accepted_per_position
    alpha = total.acceptance_sum / total.acceptance_count if total.acceptance_count else None
    c = _cost_coefficient(total, plain, len(medians[PLAIN]))
    gamma = sum(drafted) / total.row_steps if total.row_steps else 0.0
    same = [m.same_text for m in everything if m.same_text is not None]
    return {
        "name": name,
        "dataset": mine[0].dataset,
        "batch_size": mine[0].batch_size,
        "temperature": mine[0].temperature,
        "prompts": len(mine),
        "repeats": len(repeats),
        "identical": all(same) if same else None,
        "tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": _speed(mine),
        "tokens_per_second_spread": [speeds[0], speeds[len(speeds) // 2], speeds[-1]],
        "tokens_per_second_by_repeat": [_speed(rows) for rows in repeats],
        "speedup": speed_ratio(mine, medians[PLAIN]),
        "speedup_interval": ratios[PLAIN]["interval"] if PLAIN in ratios else None,
        "ratios": ratios,
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "acceptance_per_position": [a / d for a, d in zip(accepted, drafted, strict=False) if d],
        "gamma": gamma,
        "alpha": alpha,
        "c": c,
        "predicted_speedup": _predicted(alpha, c, gamma),
        "prefill_seconds": total.prefill_seconds,
        "decode_seconds": decode,
        "draft_seconds": total.draft_seconds,
        "verify_seconds": total.verify_seconds,
        "overhead_seconds": decode - total.draft_seconds - total.verify_seconds,
        "target_calls": total.target_calls,
        "draft_calls": total.draft_calls,
        "peak_memory_bytes": max(m.peak_memory_bytes for m in everything),
        "differences": [m.difference | {"prompt": m.prompt} for m in everything if m.difference],
    }


def _speed(counts: Iterable[Counts]) -> float:
    total = sum(counts, Counts())
    return total.tokens / total.seconds


def _cost_coefficient(mine: Counts, plain: Counts, prompts: int) -> float | None:
    """c = T_draft / T_target by mean steps, 0 for drafts without a model, None where no step was seen."""
    steps = plain.target_calls - prompts  # one forward of each reads its prompt
    if not mine.draft_calls:
        return 0.0
    if not mine.draft_seconds or not steps:
        return None
    return (mine.draft_seconds / mine.draft_calls) / (plain.verify_seconds / steps)


def _predicted(alpha: float | None, c: float | None, gamma: float) -> float | None:
    """Theorem 3.8 at the mean drafted window, or None where nothing was drafted."""
    if alpha is None or c is None:
        return None
    return theory.improvement_factor(min(alpha, 1.0), round(gamma), c)
