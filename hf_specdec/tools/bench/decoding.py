"""One metered `generate` call of a method: what it wrote, drafted and accepted, and what it took."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...stats import SpeculationStats
from ..instruments.ends import until_end
from ..instruments.meter import Meter, metered
from .method import Method


@dataclass(kw_only=True)
class Generation:
    """One `generate` call of a method."""

    method: Method
    rows: list[list[int]]
    """new tokens per row, up to the end of its text"""
    meter: Meter
    stats: SpeculationStats
    """its counts; times are the meter's, which are taken alike of all methods"""
    peak_memory_bytes: int = 0


def decode(
    target: PreTrainedModel, method: Method, inputs: Mapping[str, Tensor], seed: int = 0, **options: Any
) -> Generation:
    """One metered call of a method.

    Args:
        inputs: `input_ids` [B, P] and `attention_mask`.
        seed: of sampling.
        options: of `generate`.
    """
    torch.manual_seed(seed)
    with metered(target, method.draft) as meter:
        rows = method.generate(target, inputs, **options)
    rows = [until_end(target, row) for row in rows]
    told = method.drafter.last_stats if method.drafter is not None else None
    stats = replace(
        told or _counted(method, meter, inputs["input_ids"].shape[1], rows),
        emitted_tokens=sum(map(len, rows)),
        target_calls=len(meter.of("target")) if method.rounds is None else len(rows) + len(method.rounds),
        total_seconds=meter.seconds,
        prefill_seconds=meter.prefill_seconds,
        draft_seconds=meter.total("draft"),
        verify_seconds=meter.total("target"),
    )
    return Generation(method=method, rows=rows, meter=meter, stats=stats)


def _counted(method: Method, meter: Meter, prompt: int, rows: Sequence[Sequence[int]]) -> SpeculationStats:
    """Of a method that is no drafter's."""
    rounds = method.rounds
    if rounds is None:
        rounds = meter.accepted_per_round(prompt, len(rows[0])) if len(rows) == 1 else []
    return SpeculationStats(
        draft_calls=len(meter.of("draft")),
        row_steps=len(rounds) or sum(map(len, rows)),  # only plain decoding takes a batch
        drafted_per_position=Counter(i for drafted, _ in rounds for i in range(drafted)),
        accepted_per_position=Counter(i for _, accepted in rounds for i in range(accepted)),
        rejections=sum(accepted < drafted for drafted, accepted in rounds),
    )
