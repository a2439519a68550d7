"""Prompts decoded by several methods in turn, round by round, and what came of it: speed-ups and same texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.methods import Generation, Method, decode
from ..instruments.audit import Audit, Difference

ROUNDS = 3


@dataclass(eq=False)
class Task:
    """A prompt, or a batch of them, and what methods made of it."""

    inputs: dict[str, Any]
    """`input_ids` [B, P] and `attention_mask`"""
    made: dict[str, Generation]
    """by the method's name, plain decoding's first; a method that refused the task is missing"""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """by the method's name, one figure per round, for `shared` new tokens in each row"""

    @property
    def shared(self) -> int:
        """New tokens per row that every method writes: as many as the shortest text has."""
        return min(len(row) for made in self.made.values() for row in made.rows)

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])


def measure(
    target: PreTrainedModel,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    seed: int = 0,
    told: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> None:
    """Time all methods on all tasks, in rounds in which they take turns.

    Args:
        told: is called with what is about to be done.
        options: of `generate`, except for the number of tokens.
    """
    for number in range(ROUNDS):
        for task in tasks:
            able = [method for method in methods if method.name in task.made]
            first = number % len(able)  # nobody is always first
            for method in able[first:] + able[:first]:
                told(f"round {number + 1} of {ROUNDS}: {method.name}")
                made = decode(target, method, task.inputs, seed, **options | {"max_new_tokens": task.shared})
                # A text may end early: a sampled one, or one that differs after a near tie.
                seconds = made.meter.seconds * task.shared * task.rows / max(made.tokens, 1)
                task.seconds.setdefault(method.name, []).append(seconds)


def decoded_by_all(tasks: Sequence[Task]) -> list[Task]:
    """The tasks that no method refused; all of them, where there are none."""
    names = {name for task in tasks for name in task.made}
    return [task for task in tasks if task.made.keys() == names] or list(tasks)


def speed(name: str, tasks: Sequence[Task]) -> float:
    """A method's tokens per second, by the median of each task's rounds."""
    return sum(task.shared * task.rows for task in tasks) / sum(median(task.seconds[name]) for task in tasks)


def gain(name: str, tasks: Sequence[Task]) -> float:
    """A method's speed over plain decoding's."""
    return speed(name, tasks) / speed(next(iter(tasks[0].made)), tasks)


def gains(name: str, tasks: Sequence[Task]) -> list[float]:
    """A method's speed-up in each round, over the tasks together."""
    plain = next(iter(tasks[0].made))
    mine, theirs = ([sum(each) for each in zip(*(t.seconds[n] for t in tasks), strict=True)] for n in (name, plain))
    return [them / me for me, them in zip(mine, theirs, strict=True)]


def table(tasks: Mapping[str, Task], compared: bool = True) -> Table:
    """One line per method: its speed-up on each task, and over all tasks that no method refused.

    Args:
        tasks: by title; a single one needs none.
        compared: whether the texts should be the same.
    """
    titles = list(tasks) if len(tasks) > 1 else []
    lines = Table(box=None, padding=(0, 1, 0, 0))
    lines.add_column("", no_wrap=True)
    for title in (
        *titles,
        *(("all",) if titles else ("tokens/s", "speed-up")),
        "rounds",
        "tokens\n/call",
        "same\ntext",
    ):
        lines.add_column(title, justify="right", no_wrap=True)
    shared = decoded_by_all(list(tasks.values()))
    plain, *names = dict.fromkeys(name for task in tasks.values() for name in task.made)
    for name in (plain, *names):
        per_task = [f"{gain(name, [task]):.2f}x" if name in task.made else "refused" for task in tasks.values()]
        mine = [task for task in shared if name in task.made]
        by_round = gains(name, mine)
        length = sum(task.made[name].mean_acceptance_length for task in mine) / len(mine)
        same = [
            ours == theirs
            for task in tasks.values()
            if name in task.made
            for ours, theirs in zip(task.made[name].rows, task.made[plain].rows, strict=True)
        ]
        lines.add_row(
            name,
            *(per_task if titles else [f"{speed(name, mine):.1f}"]),
            f"{gain(name, mine):.2f}x",
            "" if name == plain else f"{min(by_round):.2f}-{max(by_round):.2f}",
            f"{length:.2f}",
            "" if name == plain else f"{sum(same)} of {len(same)}" if compared else "sampled",
        )
    return lines


def differences(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task
) -> Iterator[tuple[str, Difference]]:
    """Where a text of a task leaves plain decoding's, with the method and the row that it is of."""
    plain, *others = task.made.values()
    ids, masks = task.inputs["input_ids"], task.inputs["attention_mask"]
    for b, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        audit = Audit(target, row[None, mask.bool()], plain.rows[b], pad_token_id=tokenizer.pad_token_id)
        for other in others:
            if (found := audit.difference(other.rows[b])) is not None:
                yield other.method.name if task.rows == 1 else f"{other.method.name}, row {b + 1},", found
