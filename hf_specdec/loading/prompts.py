"""Prompts from JSON lines of the usual benchmark sets, or from plain text with a prompt per line."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpeculationError

MAX_LINE_BYTES = 1_000_000
"""A longer line is a file of another kind, or one that lost its line breaks."""


@dataclass(frozen=True)
class Task:
    """A shape of JSON line and the template that makes a prompt of it."""

    name: str
    fields: dict[str, type]
    template: Callable[[dict[str, Any]], str]


WARM_UP_TEXT = "The weather of the coming days will be much like that of the days before."
"""Text of no importance, for the first calls, which are not measured."""

TASKS = (
    Task("prompt", {"prompt": str}, lambda row: row["prompt"]),  # HumanEval, or any file of ready prompts
    Task(
        "mbpp",
        {"text": str, "code": str, "test_list": list},
        lambda row: '"""\n' + row["text"] + "\n" + "\n".join(row["test_list"][:1]) + '\n"""\n',
    ),
    Task("sql", {"db": str, "question": str}, lambda row: f"-- Database: {row['db']}\n-- {row['question']}\nSELECT"),
    Task("question", {"question": str}, lambda row: f"Question: {row['question']}\nAnswer:"),  # GSM8K
    Task("e2e_nlg", {"mr": str}, lambda row: f"Meaning: {row['mr']}\nText:"),
    Task("dialogsum", {"dialogue": str}, lambda row: f"{row['dialogue']}\nSummary:"),
    Task("spec_bench", {"turns": list}, lambda row: row["turns"][0]),
    Task("text", {"text": str}, lambda row: row["text"]),
)
"""The first task whose fields a line has is taken."""


def load_prompts(path: str | Path, limit: int | None = None, category: str | None = None) -> list[str]:
    """The distinct prompts of a file, in order.

    Args:
        path: `.json` or `.jsonl` for JSON lines of one of `TASKS`; anything else is plain text, a prompt per line.
        limit: how many to take at most.
        category: take only JSON lines whose field `category` is this, as those of Spec-Bench.

    Raises:
        SpeculationError: no such file, a line that is not JSON, lacks the fields, or is too long, no prompt at all, or
            none of the category.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise SpeculationError(f"limit must be 1 or more, got {limit}")
    is_json = path.suffix in (".json", ".jsonl")
    read = _json_prompt if is_json else _plain_prompt
    prompts: dict[str, None] = {}  # a set that keeps its order
    categories: set[str] = set()
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        if category is not None:
            found = _json_row(where, line).get("category") if is_json else None
            categories |= {found} if isinstance(found, str) else set()
            if found != category:
                continue
        prompts[read(where, line)] = None
        if len(prompts) == limit:
            break
    if category is not None and not prompts:
        known = ", ".join(sorted(categories)) or "no categories; leave it out"
        raise SpeculationError(f"no prompt of category {category!r}: {path} has {known}")
    if not prompts:
        raise SpeculationError(f"{path} holds no prompt; give JSON lines or plain text with a prompt per line")
    return list(prompts)


def sample_prompts(path: str | Path, limit: int | None, seed: int) -> list[str]:
    """At most `limit` prompts from all over a file: neighbours are often alike."""
    prompts = load_prompts(path)
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of the lines that are not blank."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise SpeculationError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes; "
                        "put each prompt on a line of its own, as JSON lines"
                    )
                if text := line.decode("utf-8").strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise SpeculationError(f"{path}, line {number} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SpeculationError(f"cannot read the prompts of {path}: {error.strerror or error}") from error


def _plain_prompt(where: str, line: str) -> str:
    return line


def _json_row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpeculationError(f"{where} is not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise SpeculationError(f"{where} must be a JSON object, got {type(row).__name__}")
    return row


def _json_prompt(where: str, line: str) -> str:
    row = _json_row(where, line)
    for task in TASKS:
        if all(isinstance(row.get(name), kind) for name, kind in task.fields.items()):
            try:
                prompt = task.template(row)
            except (IndexError, TypeError) as error:
                raise SpeculationError(f"{where} does not fit the {task.name} template: {error}") from error
            if not isinstance(prompt, str) or not prompt.strip():
                raise SpeculationError(f"{where} makes an empty prompt with the {task.name} template")
            return prompt
    known = "; ".join(f"{task.name}: {', '.join(task.fields)}" for task in TASKS)
    raise SpeculationError(f"{where} has the fields {sorted(row)}, which fit no task. Known tasks: {known}")
