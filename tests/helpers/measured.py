"""A measurement of a benchmark, made up."""

from collections import Counter
from dataclasses import fields
from typing import Any

from hf_specdec.stats import SpeculationStats
from hf_specdec.tools.bench.results import Measurement

COUNTED = {field.name for field in fields(SpeculationStats)}


def measurement(method: str, prompt: int, repeat: int, tokens: int, seconds: float, **more: Any) -> Measurement:
    counts: dict[str, Any] = {"prefill_seconds": 0.1, "draft_seconds": 0.2, "verify_seconds": 0.3}
    counts |= {"target_calls": 10, "row_steps": 9, "emitted_tokens": tokens, "total_seconds": seconds}
    if method != "plain":
        counts |= {"draft_calls": 20, "acceptance_sum": 12.0, "acceptance_count": 15}
        counts |= {"drafted_per_position": [9, 9], "accepted_per_position": [6, 3]}
    counts |= {name: more.pop(name) for name in COUNTED & more.keys()}
    counts |= {name: Counter(dict(enumerate(value))) for name, value in counts.items() if isinstance(value, list)}
    figures = {"dataset": "set", "batch_size": 1, "temperature": 0.0, "same_text": True, "difference": None}
    figures |= {"method": method, "prompt": prompt, "repeat": repeat, "peak_memory_bytes": 1000} | more
    return Measurement(**figures, stats=SpeculationStats(**counts))
