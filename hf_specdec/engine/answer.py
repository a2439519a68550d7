"""`Answer`: a text that is being written, for whoever waits for it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from ..errors import SpeculationError
from ..stats import SpeculationStats


class QueueFull(SpeculationError):
    """As many requests wait as may wait; try again when one is answered."""


class Answer:
    """The new tokens of one request: `result()` waits for all of them, iteration gives each when it is there."""

    def __init__(self, prompt_tokens: int, wake: Callable[[], None]) -> None:
        """
        Args:
            wake: called when somebody cancels.
        """
        self.prompt_tokens = prompt_tokens
        self.stats = SpeculationStats(mode="joined")
        """of this request's rounds; those of the rows beside it take the same time"""
        self.finish_reason: str | None = None
        """None while it is written; then "stop", "length", or "cancelled" """
        self.cancelled = False
        self.future: Future[list[int]] = Future()
        """of the same list as `result`'s, for `concurrent.futures.wait` or `asyncio.wrap_future`; what lets go of it is
        `cancel`"""
        self.future.set_running_or_notify_cancel()  # nobody takes it away while it is written
        self._tokens: list[int] = []
        self._news, self._wake = threading.Condition(), wake

    @property
    def tokens(self) -> list[int]:
        """What is there by now, without the prompt."""
        return list(self._tokens)

    def result(self, timeout: float | None = None) -> list[int]:
        """All new tokens, the one that ended the text among them; of a cancelled request those that there were.

        Args:
            timeout: seconds to wait.

        Raises:
            TimeoutError: it is not finished by then.
            Exception: whatever has kept it from being finished.
        """
        return self.future.result(timeout)

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.future.done()

    def __iter__(self) -> Iterator[int]:
        """Each token when it is there.

        Raises:
            Exception: whatever has kept the text from being finished.
        """
        given = 0
        while new := self._beyond(given):
            yield from new
            given += len(new)
        self.future.result()

    def _beyond(self, given: int) -> list[int]:
        """Tokens that come after so many; none where none will come any more."""
        with self._news:
            self._news.wait_for(lambda: len(self._tokens) > given or self.future.done())
            return self._tokens[given:]

    def cancel(self) -> None:
        """Let go of it. A row that is being decoded leaves before the next round."""
        self.cancelled = True
        self._wake()

    # ------------------------------------------------------------------ for the decoder

    def extend(self, tokens: list[int]) -> None:
        """More tokens are there."""
        with self._news:
            self._tokens += tokens
            self._news.notify_all()

    def finish(self, reason: str | None, error: BaseException | None = None) -> bool:
        """Nothing more will come; false where that was said before."""
        if self.future.done():
            return False
        self.finish_reason = reason
        self.future.set_exception(error) if error is not None else self.future.set_result(self.tokens)
        with self._news:
            self._news.notify_all()
        return True

    def __repr__(self) -> str:
        state: Any = self.finish_reason or "being written"
        return f"Answer({self.prompt_tokens} + {len(self._tokens)} tokens, {state})"
