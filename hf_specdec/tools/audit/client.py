"""`Server`: one that is compatible with OpenAI's API, asked over HTTP."""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ...clock import Deadline
from ...errors import SpeculationError, shortened
from ..loading.prompts import Prompt
from .said import Said

AT_ONCE = 4
"""requests that a server gets at the same time, where it gets several"""
LIKELIEST = 5
"""tokens of which log probabilities are asked for, in each place"""
NOT_TAKEN = (400, 422, 501)
"""status codes of a request that a server does not take"""
DRAFTED = re.compile(r"^vllm:spec_decode_num_draft_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
CHUNK = 1 << 16

T = TypeVar("T")


class ServerError(SpeculationError):
    """What a server answers is no text."""

    def __init__(self, server: "Server", words: str, status: int | None = None) -> None:
        """
        Args:
            words: a sentence without its subject.
            status: that it answers with, if it does.
        """
        super().__init__(f"{server.url} {words}")
        self.server, self.status = server, status


@dataclass
class Server:
    """A server, and what every request to it has."""

    url: str
    """with or without `/v1`"""
    fields: dict[str, Any] = field(default_factory=dict)
    """of each request, beside its own"""
    model: str | None = None
    """None for the first that it names"""
    timeout: float = 60.0
    """seconds that an answer may take"""
    raw: bool = False
    """whether chats are sent as plain text, too"""
    asked: Callable[[], Any] = lambda: None
    """called after each answer"""
    likeliest: bool = True
    """whether it is asked for log probabilities"""

    def __post_init__(self) -> None:
        self.base = self.url.rstrip("/").removesuffix("/v1")

    def meet(self, prompt: Prompt) -> None:
        """Find out which model it has, whether it answers, and whether it gives log probabilities.

        Raises:
            ServerError: it does not answer.
        """
        if self.model is None:
            try:
                self.model = self._send("/v1/models")["data"][0]["id"]
            except (KeyError, IndexError, TypeError) as error:
                raise ServerError(self, "names no model at /v1/models; name one with --model") from error
        try:
            self.ask(prompt, max_tokens=1, temperature=0)
        except ServerError as error:
            if error.status not in NOT_TAKEN:
                raise
            self.likeliest = False  # some give no log probabilities, or none where they draft
            self.ask(prompt, max_tokens=1, temperature=0)

    def ask(self, prompt: Prompt, **fields: Any) -> Said:
        """The answer to a prompt.

        Args:
            fields: of the request, beside model and prompt.

        Raises:
            ServerError: there is none.
        """
        chat = prompt.chat and not self.raw
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": self.model} | fields | self.fields
        if chat:
            body["messages"] = prompt.messages
        else:
            body["prompt"] = "\n\n".join(message["content"] for message in prompt.messages)
        if self.likeliest:
            body |= {"logprobs": True, "top_logprobs": LIKELIEST} if chat else {"logprobs": LIKELIEST}
        answer = self._send(path, body)
        try:
            said = Said.read(answer)
        except ValueError as error:
            raise ServerError(self, f"answers {path} with what is no text: {error}") from error
        self.asked()
        return said

    def drafted(self) -> int | None:
        """Tokens drafted since it was started; None where its metrics do not tell (vLLM's and ours do)."""
        try:
            counts = DRAFTED.findall(self._read("/metrics", None).decode(errors="replace"))
        except ServerError:
            return None
        return round(sum(map(float, counts))) if counts else None

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a request is answered with."""
        text = self._read(path, body)
        try:
            return json.loads(text)
        except ValueError as error:
            said = shortened(text.decode(errors="replace").strip())
            raise ServerError(
                self, f"answers {path} with {said!r}, which is no JSON; is it compatible with OpenAI's API?"
            ) from error

    def _read(self, path: str, body: dict[str, Any] | None) -> bytes:
        """What a request is answered with."""
        headers, late = {"Content-Type": "application/json"}, Deadline(self.timeout)
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.base + path, data, headers), timeout=self.timeout) as response:
                if response.headers.get_content_type() == "text/event-stream":
                    raise ServerError(self, f"answers {path} in a stream only, which was not asked for")
                text = b""
                while chunk := response.read1(CHUNK):
                    text += chunk
                    if late.over:
                        raise TimeoutError
                return text
        except HTTPError as error:
            words = f"answers {path} with status {error.code}: {_words(error) or error.reason}"
            raise ServerError(self, words, error.code) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                words = f"has not answered {path} within {self.timeout:g} seconds; allow more with --timeout"
                raise ServerError(self, words) from error
            raise ServerError(self, f"cannot be asked at {path}: {reason or 'it hung up'}; is it running?") from error


def _words(error: HTTPError) -> str:
    """The server's own, where it has any."""
    said: Any = ""
    with suppress(OSError, HTTPException, ValueError):
        said = error.read(CHUNK).decode(errors="replace").strip()
        said = json.loads(said)
    for name in ("error", "message", "detail"):
        said = said.get(name) or said if isinstance(said, dict) else said
    return shortened(str(said))


def at_once(calls: Sequence[Callable[[], T]], threads: int = AT_ONCE) -> list[T]:
    """What calls return, of which several run at the same time. The first error ends them all, and so does Ctrl-C."""
    waiting: SimpleQueue[tuple[int, Callable[[], T]]] = SimpleQueue()
    done: SimpleQueue[tuple[int, Any, Exception | None]] = SimpleQueue()

    def work() -> None:
        with suppress(Empty):
            while True:
                number, call = waiting.get_nowait()
                try:
                    done.put((number, call(), None))
                except Exception as error:
                    done.put((number, None, error))

    for item in enumerate(calls):
        waiting.put(item)
    for _ in range(min(threads, len(calls))):
        Thread(target=work, daemon=True).start()  # which the end of the process does not wait for
    results: dict[int, T] = {}
    try:
        while len(results) < len(calls):
            number, result, error = done.get()
            if error is not None:
                raise error
            results[number] = result
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
    return [results[number] for number in range(len(calls))]
