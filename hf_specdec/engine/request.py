"""`Request`: what somebody asks for, who is told each token as it comes."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clock import now
from ..target.shelf import keep_a_share
from ..verify.randomness import Randomness
from .answer import Answer
from .call import Call


@dataclass
class Request:
    """One request."""

    number: int
    """nobody else ever has it"""
    call: Call
    """as transformers prepared it"""
    answer: Answer
    randomness: Randomness
    began: float
    """by the clock: when its turn came"""
    prompt: list[int]
    settings: Hashable
    """what it has in common with requests whose tokens are chosen in the same way (`settings_of`)"""

    @property
    def end(self) -> int:
        """Tokens that it may have in the end, the prompt included."""
        most = self.call.stopping.max_length
        assert most is not None  # a request without an end is not taken
        return most

    def finish(self, error: BaseException | None = None) -> None:
        """The request is over."""
        answer = self.answer
        answer.stats.total_seconds = now() - self.began
        answer.stats.plain_steps = max(0, len(answer.tokens) - 1)
        answer.stats.held_bytes = keep_a_share()
        ended = bool(answer.tokens) and answer.tokens[-1] in self.call.stopping.eos
        reason = "length" if answer.prompt_tokens + len(answer.tokens) >= self.end and not ended else "stop"
        first = answer.finish(None if error is not None else "cancelled" if answer.cancelled else reason, error)
        if first and self.call.streamer is not None:
            with suppress(Exception):  # its owner has gone
                self.call.streamer.end()

    def tell(self, tokens: list[int]) -> None:
        """The owner gets the tokens; one who does not want them any more is let go."""
        self.answer.extend(tokens)
        if self.call.streamer is not None and not self.answer.cancelled:
            try:
                for token in tokens:
                    self.call.streamer.put(torch.tensor([token], device="cpu"))
            except Exception:  # who was to read it has gone
                self.answer.cancelled = True


def settings_of(call: Call) -> Hashable:
    """What two calls have in common whose tokens are chosen in the same way."""
    processors = tuple((type(p).__qualname__, _frozen(vars(p))) for p in call.processing.processors)
    return bool(call.config.do_sample), call.rules, tuple(sorted(call.stopping.eos)), processors


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(
            (str(name), _frozen(inner)) for name, inner in sorted(value.items(), key=lambda item: str(item[0]))
        )
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, Tensor):
        return tuple(value.shape), _frozen(value.tolist())
    return value if isinstance(value, (int, float, str, type(None), torch.device)) else repr(value)
