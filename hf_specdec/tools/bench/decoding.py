"""One metered `generate` call of a method: what it wrote, drafted and accepted, and what it took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..instruments.ends import until_end
from ..instruments.meter import Meter, metered
from .methods import Method
from .results import Counts


@dataclass(kw_only=True)
class Generation(Counts):
    """One `generate` call of a method."""

    method: Method
    rows: list[list[int]]
    """new tokens per row, up to the end of its text"""
    meter: Meter
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
    return Generation(
        method=method,
        rows=rows,
        meter=meter,
        tokens=sum(map(len, rows)),
        seconds=meter.seconds,
        prefill_seconds=meter.prefill_seconds,
        draft_seconds=meter.total("draft"),
        verify_seconds=meter.total("target"),
        target_calls=len(meter.of("target")),
        **_acceptance(method, meter, inputs["input_ids"].shape[1], rows),
    )


def _acceptance(method: Method, meter: Meter, prompt: int, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The other counts, from the drafter's statistics, or, for transformers' loops, from the target's forwards."""
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        known = stats.acceptance_count > 0
        return {
            "draft_calls": stats.draft_calls,
            "row_steps": stats.row_steps,
            "drafted_per_position": _by_position(stats.drafted_per_position),
            "accepted_per_position": _by_position(stats.accepted_per_position),
            "acceptance_sum": stats.acceptance_sum if known else float(stats.accepted_tokens),
            "acceptance_count": stats.acceptance_count if known else stats.accepted_tokens + stats.rejections,
        }
    rounds = meter.accepted_per_round(prompt, len(rows[0])) if len(rows) == 1 else []
    longest = max((drafted for drafted, _ in rounds), default=0)
    return {
        "draft_calls": len(meter.of("draft")),
        "row_steps": len(rounds) or sum(map(len, rows)),  # only plain decoding takes a batch
        "drafted_per_position": [sum(drafted > i for drafted, _ in rounds) for i in range(longest)],
        "accepted_per_position": [sum(accepted > i for _, accepted in rounds) for i in range(longest)],
        "acceptance_sum": float(sum(accepted for _, accepted in rounds)),
        "acceptance_count": sum(accepted + (accepted < drafted) for drafted, accepted in rounds),
    }


def _by_position(counts: Mapping[int, int]) -> list[int]:
    return [counts.get(i, 0) for i in range(max(counts, default=-1) + 1)]
