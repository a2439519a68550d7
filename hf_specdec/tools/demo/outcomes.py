"""What methods made of prompts, for the terminal: a table, and where their texts part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..instruments.audit import Audit, Difference
from .compare import Outcome, Task, gains, of_all

REPEATED = 8
"""tokens that have to come again, one after the other, for a text to repeat itself"""


def table(tasks: Mapping[str, Task], compared: bool = True) -> Table:
    """One line per method: its speed-up on each kind of prompt, and over all that every method decoded.

    Args:
        tasks: per kind; the figures over all are of the kinds that no method refused.
        compared: whether the texts should be the same.
    """
    kinds = list(tasks) if len(tasks) > 1 else []
    lines = Table(box=None, padding=(0, 1, 0, 0))
    lines.add_column("", no_wrap=True)
    for title in (*kinds, *(("all",) if kinds else ("tokens/s", "speed-up")), "rounds", "tokens\n/call", "same\ntext"):
        lines.add_column(title, justify="right", no_wrap=True)
    shared = of_all(list(tasks.values()))
    names = list(dict.fromkeys(name for task in tasks.values() for name in task.outcomes))
    for name in names:
        mine = {kind: task for kind, task in tasks.items() if name in task.outcomes}
        outcomes = [task.outcomes[name] for task in shared if name in task.outcomes]
        by_round = gains(name, shared)
        per_kind = [f"{gain(name, [tasks[kind]]):.2f}x" if kind in mine else "refused" for kind in kinds]
        same = [ours == plain for task in mine.values() for ours, plain in _rows(task, name, names[0])]
        lines.add_row(
            name,
            *(per_kind or (f"{speed(name, shared):.1f}",)),
            f"{gain(name, shared):.2f}x",
            "" if name == names[0] else f"{min(by_round):.2f}-{max(by_round):.2f}",
            f"{sum(found.mean_acceptance_length for found in outcomes) / len(outcomes):.2f}",
            "" if name == names[0] else f"{sum(same)} of {len(same)}" if compared else "sampled",
        )
    return lines


def _rows(task: Task, name: str, other: str) -> Iterator[tuple[list[int], list[int]]]:
    """What two methods made of each row."""
    return zip(task.outcomes[name].rows, task.outcomes[other].rows, strict=True)


def speed(name: str, tasks: Sequence[Task]) -> float:
    """A method's tokens per second, by the median of each task's rounds."""
    return sum(task.shared * task.rows for task in tasks) / sum(median(task.seconds[name]) for task in tasks)


def gain(name: str, tasks: Sequence[Task]) -> float:
    """Its speed over plain decoding's, on the tasks that it did not refuse."""
    tasks = [task for task in tasks if name in task.outcomes]
    return speed(name, tasks) / speed(next(iter(tasks[0].outcomes)), tasks)


@dataclass
class Parting:
    """A text that left plain decoding's."""

    text: str
    """which one, and where, in a sentence"""
    near_tie: bool


def partings(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    outcomes: Sequence[Outcome],
) -> Iterator[Parting]:
    """One for each method and row whose text left plain decoding's, the first outcome."""
    plain, *others = outcomes
    prompts = [ids[None, mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    options = {"pad_token_id": tokenizer.pad_token_id}
    audits = [Audit(target, prompt, row, **options) for prompt, row in zip(prompts, plain.rows, strict=True)]
    for other in others:
        for b, (audit, row) in enumerate(zip(audits, other.rows, strict=True)):
            if (found := audit.difference(row)) is not None:
                name = other.name if len(plain.rows) == 1 else f"{other.name}, row {b + 1},"
                yield Parting(f"{name} {_said(found, tokenizer)}", found.near_tie)


def _said(found: Difference, tokenizer: PreTrainedTokenizerBase) -> str:
    if found.gap is None or found.rounding is None:
        return f"ends where plain decoding goes on, or goes on where it ends, at token {found.position}"
    tokens = [tokenizer.decode([token]) for token in (found.plain_token, found.other_token)]
    steps = f"{abs(found.gap) / found.rounding:.1f} rounding steps apart"
    whose = "plain decoding's top two" if found.top_two else "plain decoding's best and another token"
    verdict = f"{whose}, {steps}" if found.near_tie else f"NOT a near tie, {steps}"
    return f"has {tokens[1]!r} instead of {tokens[0]!r} at new token {found.position}: {verdict}"


def summed_up(found: Sequence[Parting], texts: int) -> list[str]:
    """What the last column says of texts that part: near ties in one line, each other text in one of its own.

    Args:
        texts: that were compared with plain decoding's.
    """
    if not found:
        return []
    wrong = [parting.text for parting in found if not parting.near_tie]
    ties = len(found) - len(wrong)
    said = f"{ties} of {texts} texts differ from plain decoding's, {'all' if not wrong else 'these'} at near ties"
    return [f"{said} (--details lists them)."] * bool(ties) + [f"WRONG: {text}" for text in wrong]


def repeats(row: Sequence[int]) -> float:
    """Share of a text's tokens that it has said before, in runs of `REPEATED` and more: copying them is no feat."""
    runs = [tuple(row[i : i + REPEATED]) for i in range(len(row) - REPEATED + 1)]
    seen: set[tuple[int, ...]] = set()
    again: set[int] = set()
    for i, run in enumerate(runs):
        if run in seen:
            again |= set(range(i, i + REPEATED))
        seen.add(run)
    return len(again) / len(row) if row else 0.0
