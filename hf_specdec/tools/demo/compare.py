"""Inputs decoded by several methods, and their times: as many tokens on all sides, in turn, round by round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bench.methods import Method
from ..instruments.ends import until_end
from ..instruments.meter import Meter, metered

LEAST, MOST = 2, 5
"""rounds of a comparison"""


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


@dataclass(eq=False)
class Task:
    """A prompt, or a batch of them, and what methods made of it."""

    inputs: dict[str, Any]
    """`input_ids` [B, P] and `attention_mask`"""
    outcomes: dict[str, Outcome]
    """by the method's name, plain decoding's first; a method that refused it is missing"""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """by the method's name, one of each round, for `shared` tokens of each row"""

    @property
    def shared(self) -> int:
        """New tokens per row that every method writes: as many as the shortest text has."""
        return min(len(row) for outcome in self.outcomes.values() for row in outcome.rows)

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])


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


def measure(
    target: PreTrainedModel,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    seed: int = 0,
    told: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> int:
    """Time all methods on all tasks in rounds, until the last method's speed-up is told apart from that of every other:
    the range of its rounds overlaps with none of theirs. An interrupt ends it behind the last whole round.

    Args:
        told: what is about to be done.
        options: of `generate`, but for the number of tokens.

    Returns:
        How many rounds there were.
    """
    rounds = 0
    try:
        while rounds < LEAST or (rounds < MOST and not _told_apart(methods, tasks)):
            found: list[tuple[Task, Outcome]] = []
            for task in tasks:
                able = [method for method in methods if method.name in task.outcomes]
                for method in able[rounds % len(able) :] + able[: rounds % len(able)]:  # nobody is always first
                    told(f"round {rounds + 1} of {LEAST} to {MOST}: {method.name}")
                    length = options | {"max_new_tokens": task.shared}
                    found.append((task, decode(target, method, task.inputs, seed, **length)))
            for task, outcome in found:
                written = sum(map(len, outcome.rows))  # a text may end early: sampled ones, and those that part at ties
                seconds = outcome.seconds * task.shared * task.rows / max(written, 1)
                task.seconds.setdefault(outcome.name, []).append(seconds)
            rounds += 1
    except KeyboardInterrupt:
        if not rounds:
            raise
    return rounds


def of_all(tasks: Sequence[Task]) -> list[Task]:
    """Those that every method decodes; all, where there are none."""
    names = {name for task in tasks for name in task.outcomes}
    return [task for task in tasks if task.outcomes.keys() == names] or list(tasks)


def gains(name: str, tasks: Sequence[Task]) -> list[float]:
    """A method's speed-up in each round, over the tasks together."""
    plain = next(iter(tasks[0].outcomes))
    tasks = [task for task in tasks if name in task.outcomes]
    mine, theirs = ([sum(each) for each in zip(*(t.seconds[n] for t in tasks), strict=True)] for n in (name, plain))
    return [them / me for me, them in zip(mine, theirs, strict=True)]


def _told_apart(methods: Sequence[Method], tasks: Sequence[Task]) -> bool:
    tasks = of_all(tasks)
    known = {name for task in tasks for name in task.outcomes}
    *others, ours = [gains(method.name, tasks) for method in methods if method.name in known]
    return all(max(other) < min(ours) or min(other) > max(ours) for other in others)


def _mean_acceptance_length(method: Method, meter: Meter, prompt: int, rows: Sequence[Sequence[int]]) -> float:
    """From our statistics, or, for transformers' loops, from how far the target's cache moved."""
    if method.drafter is not None and method.drafter.last_stats is not None:
        return method.drafter.last_stats.mean_acceptance_length
    if len(rows) > 1:
        return 1.0  # plain decoding: transformers speculates on single rows only
    rounds = [(drafted, accepted) for drafted, accepted in meter.accepted_per_round(prompt, len(rows[0])) if drafted]
    return 1 + sum(accepted for _, accepted in rounds) / len(rounds) if rounds else 1.0
