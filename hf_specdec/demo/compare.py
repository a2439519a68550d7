"""Decode one prompt by several methods, turn by turn, so that the machine's drift hits them alike."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.methods import Method
from ..instruments.meter import Meter, metered


@dataclass
class Outcome:
    """What one method made of one prompt."""

    name: str
    tokens: list[int]
    """new tokens"""
    seconds: float
    """of a whole `generate` call, prefill included: the median of its turns"""
    mean_acceptance_length: float
    """tokens per verification, the target's own one included; 1 for plain decoding"""


def compare(
    target: PreTrainedModel,
    methods: Sequence[Method],
    inputs: dict[str, Any],
    turns: int,
    seed: int = 0,
    **options: Any,
) -> list[Outcome]:
    """One outcome per method. A short call of each comes first and is not counted.

    Args:
        inputs: `input_ids` [1, P] and `attention_mask`.
        turns: how often each method decodes the prompt.
        seed: of every call.
        options: of all `generate` calls.
    """
    tokens: dict[str, list[int]] = {}
    meters: dict[str, list[Meter]] = {method.name: [] for method in methods}
    for method in methods:
        _generate(target, method, inputs, seed, options | {"max_new_tokens": min(8, options["max_new_tokens"])})
    for turn in range(turns):
        first = turn % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            tokens[method.name], meter = _generate(target, method, inputs, seed, options)
            meters[method.name].append(meter)
    columns = inputs["input_ids"].shape[1]
    return [
        Outcome(
            method.name,
            tokens[method.name],
            statistics.median(meter.seconds for meter in meters[method.name]),
            _mean_acceptance_length(method, meters[method.name][-1], columns, len(tokens[method.name])),
        )
        for method in methods
    ]


def compare_on_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompt: str,
    turns: int,
    seed: int = 0,
    **options: Any,
) -> tuple[list[Outcome], dict[str, Any]]:
    """`compare` on a text, greedily where nothing else is said, and the inputs that the tokenizer made of it."""
    encoded = tokenizer(prompt, return_tensors="pt").to(target.device)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id} | options
    return compare(target, methods, inputs, turns, seed, **options), inputs


def _generate(
    target: PreTrainedModel, method: Method, inputs: dict[str, Any], seed: int, options: dict[str, Any]
) -> tuple[list[int], Meter]:
    torch.manual_seed(seed)
    with method.prepared(), metered(target, method.draft) as meter:
        output = target.generate(**inputs, **options, **method.kwargs)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), meter


def _mean_acceptance_length(method: Method, meter: Meter, prompt: int, tokens: int) -> float:
    """From our statistics, or, for transformers' loops, from how far the target's cache moved."""
    if method.drafter is not None and method.drafter.last_stats is not None:
        return method.drafter.last_stats.mean_acceptance_length
    rounds = [(drafted, accepted) for drafted, accepted in meter.accepted_per_round(prompt, tokens) if drafted]
    return 1 + sum(accepted for _, accepted in rounds) / len(rounds) if rounds else 1.0
