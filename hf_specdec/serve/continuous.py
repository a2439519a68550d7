"""Continuous batching behind transformers' server: what it asks its own manager for, a `BatchDecoder` answers.

transformers' manager of continuous batching takes one sampling configuration for all requests and knows neither
drafters nor stop strings. There is no option for another one, so its class is exchanged while the server runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving import utils

from ..engine.answer import Answer, QueueFull
from ..generate.decoder import BatchDecoder
from .counts import Counts
from .reporting import DRAFTS, exchanged
from .speculating import BAD, count_of, line

TOO_MANY, ENDED = 429, 503
"""status codes"""


@contextmanager
def in_place_of_stock(decoder: BatchDecoder, say: Callable[[str], None], counts: Counts) -> Iterator[Callable[[], str]]:
    """Within the block transformers' server hands its requests to the decoder; gives what to ask for a summary.

    Args:
        say: told a line of each answer.
        counts: get what was answered.
    """
    joined = Joined(decoder, say, counts)
    with exchanged(utils, "CBGenerateManager", lambda *_, **__: joined):
        yield joined.summary


class Joined(utils.BaseGenerateManager):
    """What transformers' server knows of the decoder."""

    def __init__(self, decoder: BatchDecoder, say: Callable[[str], None], counts: Counts) -> None:
        self.decoder, self.say, self.counts = decoder, say, counts
        self.answers = self.given_up = 0

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Every request brings its own settings."""

    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self.decoder.alive

    def generate_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, *_: Any, **parsing: Any
    ) -> tuple[asyncio.Queue, Any]:
        """A queue of pieces of text, and what cancels them."""
        parsing.pop("request_id", None)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = Stream(getattr(processor, "tokenizer", processor)._tokenizer, loop, queue, **parsing)
        streamer.answer = self._submit(processor, inputs, gen_config, streamer)

        def failed(future: Future[list[int]]) -> None:
            if (error := future.exception()) is not None:
                loop.call_soon_threadsafe(queue.put_nowait, utils._StreamError(str(error)))

        streamer.answer.future.add_done_callback(failed)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, *_: Any, **__: Any
    ) -> tuple[str, int, list[int]]:
        """The whole text, how many tokens were asked with, and the new ones."""
        answer = self._submit(processor, inputs, gen_config, None)
        try:
            tokens = await asyncio.wrap_future(answer.future)
        except asyncio.CancelledError:  # the client has hung up
            answer.cancel()
            raise
        return processor.decode(tokens, skip_special_tokens=True), answer.prompt_tokens, tokens

    def stop(self) -> None:
        """What is being written is given up: nobody will read it."""
        self.decoder.close(wait=False)

    def summary(self) -> str:
        """What was served."""
        served, stats = count_of(self.answers, self.given_up), self.decoder.stats
        return f"{served}; {stats.emitted_tokens:,} tokens; {stats.summary()}" if stats.emitted_tokens else served

    def _submit(self, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, streamer: Any) -> Answer:
        """
        Raises:
            HTTPException: it is not taken.
        """
        from fastapi import HTTPException

        if not self.decoder.alive:
            raise HTTPException(ENDED, "the server is shutting down")
        own = getattr(self.decoder.model.generation_config, "speculation_type", None)
        if own != "none" and getattr(gen_config, "speculation_type", None) == "none":
            raise HTTPException(BAD, "requests that share a batch are all drafted for; leave out speculation_type")
        config = copy(gen_config)
        config.use_cache = True  # transformers' own manager brings its cache
        config.stop_strings = config.stop_strings or None  # [] asks for none
        options = {"generation_config": config, "tokenizer": processor, "streamer": streamer}
        try:
            answer = self.decoder.submit(inputs["input_ids"], **options)
        except QueueFull as full:
            raise HTTPException(TOO_MANY, str(full)) from full
        except ValueError as error:
            raise HTTPException(BAD, str(error)) from error
        DRAFTS.set([answer.stats])
        self.answers += 1
        number = self.answers
        answer.future.add_done_callback(lambda future: self._done(number, answer, future.exception()))
        return answer

    def _done(self, number: int, answer: Answer, error: BaseException | None) -> None:
        gone = answer.finish_reason == "cancelled"
        self.given_up += error is not None or gone
        reason = "error" if error is not None else "abort" if gone else str(answer.finish_reason)
        self.counts.add(reason, answer.prompt_tokens, answer.stats)
        if error is not None:
            self.say(f"{number}: stopped by {type(error).__name__} {error}")
        else:
            self.say(f"{number}: {line(answer.stats)}" + "; cancelled" * gone)


class Stream(utils.DirectStreamer):
    """Text as it is written, which whoever hangs up cancels."""

    answer: Answer | None = None

    def cancel(self) -> None:
        super().cancel()
        if self.answer is not None:
            self.answer.cancel()
