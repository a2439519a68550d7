"""Three servers over one model: transformers', plain and with prompt lookup, and `hf-specdec serve`.

Run as `python docs/laboratory/servers.py FOLDER --prompts chat -- --drafter hub_configs/hybrid`; what
stands behind `--` goes to `hf-specdec serve`. Each gets the same chats, greedily: for whole answers, for streams, and
with a list of stops.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from openai import OpenAI
from transformers import AutoTokenizer
from typer import Argument, Option, run

from hf_specdec.tools.loading.prompts import load_prompts
from shared import show

STOCK = ["-c", "from transformers.cli.transformers import main; main()", "serve"]


@dataclass
class Seen:
    """The answers of a server."""

    texts: list[str] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    """whether a text with a stop list ends at the first stop"""
    counted: list[bool] = field(default_factory=list)
    """whether as many tokens were counted as were streamed"""
    tokens: int = 0
    seconds: float = 0.0


class Serving:
    """A server in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        command = [sys.executable, "-W", "ignore", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Any:
        while self.process.poll() is None and not self._listens():
            time.sleep(0.2)
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=600)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def asked(client: Any, model: str, chats: list[str], most: int, stops: list[str], tokenizer: Any) -> Seen:
    """All chats, one after the other."""
    seen, options = Seen(), {"model": model, "max_tokens": most, "temperature": 0}
    client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello."}], **options
    )  # what only first calls do
    for chat in chats:
        messages = [{"role": "user", "content": chat}]
        began = time.perf_counter()
        whole = client.chat.completions.create(messages=messages, **options)
        seen.seconds += time.perf_counter() - began
        seen.tokens += whole.usage.completion_tokens
        seen.texts.append(whole.choices[0].message.content)
        until = client.chat.completions.create(messages=messages, stop=stops, **options).choices[0].message.content
        places = [until.find(stop) + len(stop) for stop in stops if stop in until]
        seen.stopped.append(not places or min(places) == len(until))
        *_, last = client.chat.completions.create(messages=messages, stream=True, **options)
        written = len(tokenizer(whole.choices[0].message.content, add_special_tokens=False)["input_ids"])
        seen.counted.append(last.usage is not None and 0 <= last.usage.completion_tokens - written <= 1)
    return seen


def main(
    model: Annotated[Path, Argument(help="Folder.")],
    serve: Annotated[list[str] | None, Argument(help="Of hf-specdec serve.")] = None,
    prompts: Annotated[str, Option(help="File of chats.")] = "",
    limit: Annotated[int, Option(help="Chats.")] = 12,
    most: Annotated[int, Option(help="New tokens.")] = 64,
) -> None:
    """One server after the other."""
    chats = [prompt.turns[0] for prompt in load_prompts(prompts, limit)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        lookup = Path(folder) / "lookup"
        shutil.copytree(model, lookup)
        config = json.loads((model / "generation_config.json").read_text()) | {"prompt_lookup_num_tokens": 10}
        (lookup / "generation_config.json").write_text(json.dumps(config))
        servers = {
            "plain": [*STOCK, str(model)],
            "transformers' prompt lookup": [*STOCK, str(lookup)],
            "hf-specdec serve": ["-m", "hf_specdec.cli", "serve", str(model), *(serve or [])],
        }
        found = {}
        for name, arguments in servers.items():
            with Serving(arguments) as client:
                target = arguments[arguments.index("serve") + 1]
                found[name] = asked(client, target, chats, most, [".", "\n"], tokenizer)
    plain, rows = found["plain"], []
    for name, seen in found.items():
        same = sum(a == b for a, b in zip(seen.texts, plain.texts, strict=True))
        speed, rate = seen.tokens / seen.seconds, plain.tokens / plain.seconds
        counts = [f"{n} of {len(chats)}" for n in (sum(seen.stopped), sum(seen.counted), same)]
        rows.append((name, *counts, f"{speed:.1f}", f"{speed / rate:.2f}"))
    show(("server", "stops kept", "usage right", "same text", "tokens/s", "speed-up"), rows)


if __name__ == "__main__":
    run(main)
