"""A conversation in the terminal. All turns share one cache, so a turn reads only new tokens."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache

from ...drafters import Drafter
from ...target.devices import input_device
from ...target.inputs import CACHE
from ..instruments.recording import RecordingDrafter
from ..loading.chat import Message, conversation
from ..loading.models import Pair
from .live import LiveText

HELP = "/new starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer. Empty lines are ignored."


class Conversation:
    """Messages so far, and the target's cache of them."""

    def __init__(self, pair: Pair, drafter: Drafter, system: str | None = None) -> None:
        self.pair, self.drafter = pair, drafter
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.cache: Any = None
        self.held: list[int] = []
        """the tokens that the cache holds"""

    def answer(self, question: str, **options: Any) -> str:
        """The assistant's next message, which joins the conversation with the question.

        Args:
            options: of `generate`.
        """
        tokenizer, target = self.pair.tokenizer, self.pair.target
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = conversation(tokenizer, messages)
        cache, self.cache = self._cache_of(ids), None  # after an interrupted call the cache cannot be used again
        input_ids = torch.tensor([ids], device=input_device(target))
        output: Any = target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=self.drafter,
            **options | {CACHE: cache},
        )
        self.cache, self.held = cache, output[0, :-1].tolist()  # the last token was not fed
        text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text

    def _cache_of(self, ids: Sequence[int]) -> Any:
        """The cache, cut back to the ids' beginning that it holds: a template may write past turns in another way."""
        known = common(self.held, ids[:-1])
        if self.cache is not None and known and self.cache.is_croppable:
            with suppress(ValueError):  # a sliding window that has moved on
                self.cache.crop(known)
                return self.cache
        return DynamicCache(config=self.pair.target.config)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def talk(
    console: Console, pair: Pair, drafter: Drafter, system: str | None, first: str | None, options: dict[str, Any]
) -> None:
    """Questions from the terminal, answers to it, until the end of the input.

    Args:
        first: a question that is asked before any is read.
        options: of `generate`.
    """
    console.print(HELP, style="dim")
    live = LiveText(console, pair.tokenizer)
    recorder = RecordingDrafter(drafter, live.told)
    chat = Conversation(pair, recorder, system)
    while True:
        question = _question(console, first)
        first = None
        if question is None or question == "/exit":
            return
        if question == "/new":
            chat = Conversation(pair, recorder, system)
        elif question:
            try:
                chat.answer(question, streamer=live, **options)
            except KeyboardInterrupt:
                live.end()
                console.print("stopped; the question and its answer are forgotten", style="dim")
            else:
                console.print(str(recorder.last_stats).splitlines()[0], style="dim", markup=False)


def _question(console: Console, first: str | None) -> str | None:
    """The next line without spaces around it; None at the end of the input."""
    if first is not None:
        console.print(f"> {first}", style="bold", markup=False)
        return first.strip()
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
