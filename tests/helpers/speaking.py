"""A server that speaks as OpenAI's API has it, out of a table: what its next token is, and what it draws."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from math import log
from typing import Any

WORDS = [" the", " cat", " saw", " a", " dog", " run", " home", " and", " then", " it", " sat", " down"]
LOGPROB, NEXT, FAR = log(0.7), log(0.2), log(0.001)


class Speaker:
    """What a server says. Subclasses say something else.

    Of a prompt of length n, place i holds word (n + 5 i + i²) mod 12: with probability 0.7, and the next one with 0.2.
    """

    style = "completions"
    """completions, content (of llama.cpp and chats), or none: how log probabilities are told"""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.calls = count()

    def word(self, prompt: str, place: int) -> int:
        return (len(prompt) + 5 * place + place * place) % len(WORDS)

    def distribution(self, prompt: str, place: int) -> dict[str, float]:
        """Log probabilities of the likeliest."""
        first = self.word(prompt, place)
        words = [WORDS[(first + i) % len(WORDS)] for i in range(5)]
        return dict(zip(words, [LOGPROB, NEXT, FAR, FAR, FAR], strict=True))

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        dice = random.Random(body.get("seed", 0))
        return [
            dice.choices([*known], [2.718281828**value for value in known.values()])[0]
            if body.get("temperature")
            else max(known, key=lambda word: known[word])
            for known in (self.distribution(prompt, place) for place in range(body["max_tokens"]))
        ]

    def stopped(self, tokens: list[str], stops: list[str]) -> tuple[list[str], str, str]:
        """Tokens, text and the reason why it ends."""
        for n in range(len(tokens) + 1):
            text = "".join(tokens[:n])
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                return tokens[:n], text[: min(found)], "stop"
        return tokens, "".join(tokens), "length"

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        """Status, kind and text."""
        if path == "/v1/models":
            return self.json({"data": [{"id": "table"}]})
        if body is None:
            return 404, "text/plain", "no such page"
        self.bodies.append(body)
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        tokens, text, finish = self.stopped(self.tokens(prompt, body), body.get("stop", []))
        tops = [self.distribution(prompt, place) for place in range(len(tokens))]
        said = {"finish_reason": finish, "logprobs": self.logprobs(tokens, tops) if body.get("logprobs") else None}
        said |= {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        return self.json({"choices": [said], "usage": {"completion_tokens": len(tokens)}} | self.more(body))

    def logprobs(self, tokens: list[str], tops: list[dict[str, float]]) -> dict[str, Any] | None:
        values = [top.get(token, FAR) for token, top in zip(tokens, tops, strict=True)]
        if self.style == "completions":
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        if self.style == "none":
            return None
        places = zip(tokens, values, tops, strict=True)
        return {
            "content": [
                {
                    "token": token,
                    "logprob": value,
                    "top_logprobs": [{"token": each, "logprob": top[each]} for each in top],
                }
                for token, value, top in places
            ]
        }

    def more(self, body: dict[str, Any]) -> dict[str, Any]:
        """Fields of an answer."""
        return {}

    def json(self, value: Any, status: int = 200) -> tuple[int, str, str]:
        return status, "application/json", json.dumps(value)


@contextmanager
def speaking(speaker: Speaker) -> Iterator[str]:
    """The URL of a server on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any] | None) -> None:
            status, kind, text = speaker.answer(self.path, body)
            data = text.encode()
            with suppress(ConnectionError):  # of a client that waits no more
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
