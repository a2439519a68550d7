"""Decode one input by several methods, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bench.methods import Method
from ..instruments.ends import until_end
from ..instruments.meter import Meter, metered


@dataclass
class Outcome:
    """What one method made of one prompt, or of a batch of them."""

    name: str
    rows: list[list[int]]
    """new tokens per row, up to the end of its text"""
    seconds: float
    """of the whole `generate` call, prefill included"""
    mean_acceptance_length: float
    """tokens per verification, the target's own one included; 1 for plain decoding"""

    @property
    def count(self) -> int:
        """New tokens in all."""
        return sum(map(len, self.rows))


def decode(target: PreTrainedModel, method: Method, inputs: dict[str, Any], seed: int = 0, **options: Any) -> Outcome:
    """One `generate` call of a method.

    Args:
        inputs: `input_ids` [B, P] and `attention_mask`.
        seed: of sampling.
        options: of `generate`.
    """
    torch.manual_seed(seed)
    with method.prepared(), metered(target, method.draft) as meter:
        output: Any = target.generate(**inputs, **options, **method.kwargs)
    columns = inputs["input_ids"].shape[1]
    rows = [until_end(target, row) for row in output[:, columns:].tolist()]
    return Outcome(method.name, rows, meter.seconds, _mean_acceptance_length(method, meter, columns, rows))


def _mean_acceptance_length(method: Method, meter: Meter, prompt: int, rows: Sequence[Sequence[int]]) -> float:
    """From our statistics, or, for transformers' loops, from how far the target's cache moved."""
    if method.drafter is not None and method.drafter.last_stats is not None:
        return method.drafter.last_stats.mean_acceptance_length
    if len(rows) > 1:
        return 1.0  # plain decoding: transformers speculates on single rows only
    rounds = [(drafted, accepted) for drafted, accepted in meter.accepted_per_round(prompt, len(rows[0])) if drafted]
    return 1 + sum(accepted for _, accepted in rounds) / len(rounds) if rounds else 1.0
