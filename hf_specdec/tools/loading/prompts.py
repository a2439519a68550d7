"""Prompts of the usual benchmark sets, of chats, or of plain text with a prompt per line."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import SpeculationError, shown
from .rows import Row, read_rows


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, or a conversation to be answered turn by turn."""

    turns: tuple[str, ...]
    """what the user says, each after the answer to the one before; a text is one turn"""
    history: tuple[tuple[str, str], ...] = ()
    """role (system, user or assistant) and content of what was said before"""
    chat: bool = False
    """whether it goes into the tokenizer's chat template, where there is one; a text is continued as it is"""

    @property
    def said(self) -> "str | list[dict[str, str]]":
        """As JSON: a text, or the messages of a conversation, of which all turns are the user's."""
        if not self.chat:
            return self.turns[0]
        messages = (*self.history, *(("user", turn) for turn in self.turns))
        return [{"role": role, "content": content} for role, content in messages]

    @property
    def messages(self) -> list[dict[str, str]]:
        """What is answered first: the history, and the next turn of the user's."""
        said = (*self.history, ("user", self.turns[0]))
        return [{"role": role, "content": content} for role, content in said]

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


def _of_turns(turns: list[str]) -> Prompt:
    """A conversation of which only the questions are known, as in MT-bench."""
    if not turns:
        raise ValueError("there are no turns; give one or more texts")
    if any(isinstance(turn, dict) for turn in turns):
        return _of_messages({"messages": turns})
    return Prompt(tuple(turns), chat=True)


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
    Task(
        "e2e_nlg of the Hub",
        {"meaning_representation": str},
        lambda row: f"Meaning: {row['meaning_representation']}\nText:",
        "human_reference",
    ),
    Task("dialogsum", {"dialogue": str}, lambda row: f"{row['dialogue']}\nSummary:", "summary"),
    Task("spec_bench", {"turns": list}, lambda row: _of_turns(row["turns"])),
    Task("text", {"text": str}, lambda row: row["text"]),
    Task("messages", {"messages": list}, _of_messages),
    Task("mt_bench of the Hub", {"prompt": list}, lambda row: _of_turns(row["prompt"])),
)
"""The first task whose fields a line has is taken."""


def load_prompts(source: str | Path, limit: int | None = None, split: str = "test") -> list[Prompt]:
    """The distinct prompts of a source, in order.

    Args:
        source: as `read_rows` takes it: a file, a set of this package, or a data set of the Hub, whose rows are those
            of one of `TASKS`; a line of plain text is a prompt.
        limit: how many to take at most.
        split: of a data set whose name has none.

    Raises:
        SpeculationError: no such source, a row that lacks the fields or is too long, or no prompt at all.
    """
    return _first(source, limit, split, distinct=True)


def all_prompts(source: str | Path, limit: int | None = None, split: str = "test") -> list[Prompt]:
    """As `load_prompts`, but a prompt for each row, those that are there twice included."""
    return _first(source, limit, split, distinct=False)


def _first(source: str | Path, limit: int | None, split: str, distinct: bool) -> list[Prompt]:
    """At most `limit`."""
    if limit is not None and limit < 1:
        raise SpeculationError(f"limit must be 1 or more, got {limit}")
    prompts: dict[Any, Prompt] = {}  # which keeps its order
    for number, (where, row) in enumerate(read_rows(source, split)):
        prompt = _made(where, row)
        prompts[prompt if distinct else number] = prompt
        if len(prompts) == limit:
            break
    if not prompts:
        raise SpeculationError(f"{source} holds no prompt; give JSON lines or plain text with a prompt per line")
    return list(prompts.values())


def sample_prompts(source: str | Path, limit: int | None, seed: int, split: str = "train") -> list[Prompt]:
    """At most `limit` prompts from all over a source: neighbours are often alike."""
    prompts = load_prompts(source, split=split)
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]


def sample_examples(source: str | Path, limit: int | None, seed: int, split: str = "train") -> list[tuple[Prompt, str]]:
    """At most `limit` prompts from all over a source, each with the answer that its row gives: a field of its own in
    the known tasks, the last message of a conversation.

    Raises:
        SpeculationError: as `load_prompts`, or a row has no answer.
    """
    examples = []
    for where, row in read_rows(source, split):
        fields = row if isinstance(row, dict) else {}
        said = fields.get("messages")
        if isinstance(said, list) and said and isinstance(said[-1], dict) and said[-1].get("role") == "assistant":
            answer, fields = said[-1].get("content"), fields | {"messages": said[:-1]}
        else:
            task = next((task for task in TASKS if task.fits(fields)), None)
            answer = fields.get(task.answer) if task is not None and task.answer is not None else None
        if not isinstance(answer, str) or not answer.strip():
            known = ", ".join(f"{task.answer} ({task.name})" for task in TASKS if task.answer is not None)
            raise SpeculationError(
                f"{where} has no answer to learn; give one in the field {known}, or as the last of `messages`"
            )
        examples.append((_made(where, fields), answer))
    if not examples:
        raise SpeculationError(f"{source} holds no example; give JSON lines with prompts and answers")
    random.Random(seed).shuffle(examples)
    return examples[:limit]


def _made(where: str, row: Row) -> Prompt:
    """The prompt of a row."""
    if isinstance(row, str):
        return Prompt((row,))
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
