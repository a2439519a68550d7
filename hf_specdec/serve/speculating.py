"""`Speculating`: every `generate` call of a model drafts, whoever makes it, and something is said of each."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..clock import now
from ..drafters import Drafter
from ..errors import SpeculationError
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..target.inputs import position_limit
from ..tools.loading.chat import ask, batch
from .counts import Counts
from .reporting import DRAFTS

BAD = 400
"""status code of what was asked wrongly"""
QUESTION = "What is the capital of France?"
"""for warming up"""
WARM_UPS = 2
"""answers: the first one finds out what the model can do and starts workers, the second learns what it takes"""
WARM_TOKENS = 24


class Speculating:
    """A model and its drafter. Calls that no drafter serves are decoded plainly."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter, say: Callable[[str], None]) -> None:
        """
        Args:
            say: told a line of each answer.
        """
        self.model, self.drafter, self.say = model, drafter, say
        self.answers = self.given_up = 0
        self.counts = Counts()
        self.total = SpeculationStats()
        """of all answers"""
        self.plain_seconds = 0.0
        """that plain decoding would have taken for the drafted ones, by what each of them says"""
        self.plain_because = ""
        """why this model is never drafted for, if so"""

    def warm_up(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Answer a question, so that no client waits for what only the first call does.

        Raises:
            SpeculationError: the drafter is for another target, or cannot draft for this one.
        """
        inputs = batch([ask(tokenizer, QUESTION)], tokenizer.pad_token_id, input_device(self.model))
        options: dict[str, Any] = {"max_new_tokens": WARM_TOKENS, "num_beams": 1, "tokenizer": tokenizer}
        options["pad_token_id"] = tokenizer.pad_token_id
        for _ in range(WARM_UPS):
            self.model.generate(**inputs, **options, assistant_model=self.drafter)
        stats = self.drafter.last_stats
        if stats is not None and stats.mode == "plain":
            self.plain_because = "; ".join(stats.notes) or "it cannot verify drafts"

    @contextmanager
    def in_place(self) -> Iterator[Callable[[], str]]:
        """Within the block the model's `generate` is this one; gives what to ask for a summary."""
        plain, model = self.model.generate, self.model

        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._answer(plain, *args, **kwargs)

        model.generate = generate  # type: ignore[method-assign]
        try:
            yield self.summary
        finally:
            del model.generate

    def _answer(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.answers += 1
        number, began, prompt = self.answers, now(), _prompt_length(*args, **kwargs)
        config, streamer = kwargs.get("generation_config"), kwargs.get("streamer")
        if streamer is not None:  # ends once the answer is counted: its last chunk has the usage
            kwargs["streamer"] = SimpleNamespace(put=streamer.put, end=lambda: None)
        self.drafter.last_stats = None
        try:
            self._check(prompt, config)
            off = getattr(config, "speculation_type", None) == "none"
            output = None if off or self.plain_because else self._drafted(number, plain, *args, **kwargs)
            if output is None:
                output = plain(*args, **kwargs, speculation_type="none")
                self.say(f"{number}: {now() - began:.2f} s, decoded plainly")
        except BaseException as error:
            self.given_up += 1
            kind = type(error).__name__
            gone = "Cancelled" in kind  # what transformers' server ends its streams with
            why = "the client, which closed the connection" if gone else f"{kind} {error}"
            self.say(f"{number}: stopped after {now() - began:.2f} s by {why}")
            if isinstance(error, ValueError):  # what a client has asked wrongly is the client's to mend
                from fastapi import HTTPException

                raise HTTPException(BAD, str(error)) from error
            self._count("abort" if gone else "error", prompt or 0, 0)
            raise
        new = getattr(output, "sequences", output).shape[1] - (prompt or 0)
        full = new >= (getattr(config, "max_new_tokens", None) or math.inf)
        self._count("length" if full else "stop", prompt or 0, new)
        if streamer is not None:
            streamer.end()
        return output

    def _count(self, reason: str, prompt_tokens: int, new_tokens: int) -> None:
        """An answer has ended. Of one without drafts so many tokens are new."""
        stats = self.drafter.last_stats or SpeculationStats(emitted_tokens=new_tokens)
        self.counts.add(reason, prompt_tokens, stats)
        DRAFTS.get([]).append(stats)

    def _drafted(self, number: int, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The answer; None where no drafter serves this call."""
        try:
            output = plain(*args, **kwargs, assistant_model=self.drafter)
        except SpeculationError as refusal:  # said before any forward was made
            self.say(f"{number}: decoded plainly: {refusal}")
            return None
        stats = self.drafter.last_stats
        assert stats is not None
        self.total = self.total + stats
        self.plain_seconds += (stats.estimated_gain or 1.0) * stats.total_seconds
        self.say(f"{number}: {line(stats)}")
        return output

    def summary(self) -> str:
        """What was served."""
        served = count_of(self.answers, self.given_up)
        gain = self.plain_seconds / self.total.total_seconds if self.total.total_seconds else None
        return f"{served}; {line(self.total, gain)}" if self.total.emitted_tokens else served

    def _check(self, prompt_tokens: int | None, config: Any) -> None:
        """
        Raises:
            ValueError: there is nothing to go on from, or no room for an answer.
        """
        limit = position_limit(self.model)
        if prompt_tokens is not None and not 0 < prompt_tokens < limit:
            raise ValueError(f"a prompt must have 1 to {limit - 1} tokens, got {prompt_tokens}")
        if config is not None and config.stop_strings == []:
            config.stop_strings = None


def _prompt_length(*args: Any, **kwargs: Any) -> int | None:
    """Tokens that a call goes on from; None where it is given none."""
    given = [*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")]
    return next((ids.shape[1] for ids in given if ids is not None), None)


def count_of(answers: int, given_up: int) -> str:
    """What a summary begins with."""
    return f"{answers} answers" + f", {given_up} of them not finished" * bool(given_up)


def line(stats: SpeculationStats, gain: float | None = None) -> str:
    """A call, or several with a gain that is known, in one line."""
    return f"{stats.emitted_tokens:,} tokens in {stats.total_seconds:.2f} s; {stats.summary(gain)}"
