"""Prompts from JSON lines of the usual benchmark sets or of chats, or from plain text with a prompt per line."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SpeculationError, shown

MAX_LINE_BYTES = 1_000_000
"""A longer line is a file of another kind, or one that lost its line breaks."""


@dataclass(frozen=True)
class Prompt:
    """What a model is given: a text to be continued, or a conversation to be answered turn by turn."""

    turns: tuple[str, ...]
    """what the user says, each after the answer to the one before; a text is one turn"""
    history: tuple[tuple[str, str], ...] = ()
    """role (system, user or assistant) and content of what was said before"""
    chat: bool = False
    """whether it goes into the tokenizer's chat template, where there is one; a text is continued as it is"""

    def after(self, answer: str) -> "Prompt":
        """What is left of the conversation once its first turn has been answered."""
        said = (("user", self.turns[0]), ("assistant", answer))
        return replace(self, turns=self.turns[1:], history=self.history + said)


@dataclass(frozen=True)
class Task:
    """A shape of JSON line and the template that makes a prompt of it: a text, or a conversation."""

    name: str
    fields: dict[str, type]
    template: Callable[[dict[str, Any]], str | Prompt]
    answer: str | None = None
    """the field that holds an answer, where lines have one"""

    def fits(self, row: dict[str, Any]) -> bool:
        """Whether a line has these fields."""
        return all(isinstance(row.get(name), kind) for name, kind in self.fields.items())


def _of_turns(row: dict[str, Any]) -> Prompt:
    """A conversation of which only the questions are known, as in MT-bench."""
    if not row["turns"]:
        raise ValueError("turns is empty; give one or more texts")
    return Prompt(tuple(row["turns"]), chat=True)


def _of_messages(row: dict[str, Any]) -> Prompt:
    """A conversation with answers is history up to its last question; without any it is to be played turn by turn."""
    said = [_message(number, message) for number, message in enumerate(row["messages"], start=1)]
    first = sum(role == "system" for role, _ in said[:1])
    if not said or (last := said[-1][0]) != "user":
        raise ValueError(f"messages must end with a user's, got {last if said else 'none'}; leave out what comes after")
    if any(role == "system" for role, _ in said[first:]):
        raise ValueError("a system message must be the first, and there can be only one; put them together")
    if any(role == "assistant" for role, _ in said):
        first = len(said) - 1
    return Prompt(tuple(content for _, content in said[first:]), tuple(said[:first]), chat=True)


def _message(number: int, message: Any) -> tuple[str, str]:
    """Role and content."""
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"message {number} has the role {shown(role)}; it must be system, user or assistant")
    if not isinstance(content, str):
        raise ValueError(f"message {number} has the content {shown(content)}; it must be a text")
    return role, content


WARM_UP_TEXT = "The weather of the coming days will be much like that of the days before."
"""Text of no importance, for the first calls, which are not measured."""

TASKS = (
    Task("prompt", {"prompt": str}, lambda row: row["prompt"]),  # HumanEval, or any file of ready prompts
    Task(
        "mbpp",
        {"text": str, "code": str, "test_list": list},
        lambda row: '"""\n' + row["text"] + "\n" + "\n".join(row["test_list"][:1]) + '\n"""\n',
        "code",
    ),
    Task("sql", {"db": str, "question": str}, lambda row: f"-- Database: {row['db']}\n-- {row['question']}\nSELECT"),
    Task("question", {"question": str}, lambda row: f"Question: {row['question']}\nAnswer:", "answer"),  # GSM8K
    Task("e2e_nlg", {"mr": str}, lambda row: f"Meaning: {row['mr']}\nText:", "ref"),
    Task("dialogsum", {"dialogue": str}, lambda row: f"{row['dialogue']}\nSummary:", "summary"),
    Task("spec_bench", {"turns": list}, _of_turns),
    Task("text", {"text": str}, lambda row: row["text"]),
    Task("messages", {"messages": list}, _of_messages),
)
"""The first task whose fields a line has is taken."""


def load_prompts(path: str | Path, limit: int | None = None, category: str | None = None) -> list[Prompt]:
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
    prompts: dict[Prompt, None] = {}  # a set that keeps its order
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


def sample_prompts(path: str | Path, limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts from all over a file: neighbours are often alike."""
    prompts = load_prompts(path)
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]


def sample_examples(path: str | Path, limit: int | None, seed: int) -> list[tuple[Prompt, str]]:
    """At most `limit` prompts from all over a file of JSON lines, each with the answer that its line gives: a field of
    its own in the known tasks, the last message of a conversation.

    Raises:
        SpeculationError: as `load_prompts`, or a line has no answer.
    """
    path, examples = Path(path), []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        row = _json_row(where, line)
        said = row.get("messages")
        if isinstance(said, list) and said and isinstance(said[-1], dict) and said[-1].get("role") == "assistant":
            answer, row = said[-1].get("content"), row | {"messages": said[:-1]}
        else:
            task = next((task for task in TASKS if task.fits(row)), None)
            answer = row.get(task.answer) if task is not None and task.answer is not None else None
        if not isinstance(answer, str) or not answer.strip():
            known = ", ".join(f"{task.answer} ({task.name})" for task in TASKS if task.answer is not None)
            raise SpeculationError(
                f"{where} has no answer to learn; give one in the field {known}, or as the last of `messages`"
            )
        examples.append((_made(where, row), answer))
    if not examples:
        raise SpeculationError(f"{path} holds no example; give JSON lines with prompts and answers")
    random.Random(seed).shuffle(examples)
    return examples[:limit]


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


def _plain_prompt(where: str, line: str) -> Prompt:
    return Prompt((line,))


def _json_row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpeculationError(f"{where} is not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise SpeculationError(f"{where} must be a JSON object, got {type(row).__name__}")
    return row


def _json_prompt(where: str, line: str) -> Prompt:
    return _made(where, _json_row(where, line))


def _made(where: str, row: dict[str, Any]) -> Prompt:
    """The prompt of a line."""
    for task in TASKS:
        if task.fits(row):
            try:
                made = task.template(row)
            except (TypeError, ValueError) as error:
                raise SpeculationError(f"{where} does not fit the {task.name} template: {error}") from error
            prompt = made if isinstance(made, Prompt) else Prompt((made,))
            if not all(isinstance(turn, str) and turn.strip() for turn in prompt.turns):
                raise SpeculationError(f"{where} makes an empty prompt with the {task.name} template")
            return prompt
    known = "; ".join(f"{task.name}: {', '.join(task.fields)}" for task in TASKS)
    raise SpeculationError(f"{where} has the fields {sorted(row)}, which fit no task. Known tasks: {known}")
