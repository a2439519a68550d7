"""A server under a mixed load for many minutes: clients that wait, stream and hang up; workers that are killed.

Run as `python docs/laboratory/serving_load.py --minutes 30 -- TARGET --draft DRAFT --drafter pearl:worker=process`;
what stands behind `--` goes to `hf-specdec serve`. Every answer is held against plain decoding's, greedy, in float32.
Memory, open files and processes of the server are told as they go, and what is left of it when it has been told to end.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from openai import OpenAI, OpenAIError
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Argument, Option, run

QUESTIONS = 24
LENGTHS = (8, 96)
"""new tokens"""
HANGS_UP = 0.3
"""of the clients"""
SAMPLES = 20
"""lines of what the server holds"""


def open_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody does there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Server:
    """`hf-specdec serve` in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.port, self.name = open_port(), arguments[0]
        command = [sys.executable, "-W", "ignore", "-m", "hf_specdec.cli", "serve", *arguments, "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        while not listens(self.port):
            if self.process.poll() is not None:
                raise SystemExit("\n".join(self.lines))
            time.sleep(0.2)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line.rstrip() for line in self.process.stderr)

    @property
    def client(self) -> Any:
        """One more."""
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300)

    def family(self) -> list[int]:
        """The server's process and all below it."""
        found = [self.process.pid]
        for parent in found:
            with suppress(OSError):
                tasks = Path(f"/proc/{parent}/task").iterdir()
                found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return found

    def held(self) -> tuple[int, int, int]:
        """MiB of memory, open files, processes."""
        memory = files = 0
        family = self.family()
        for process in family:
            with suppress(OSError, ValueError, IndexError):  # one that has just died has none
                status = Path(f"/proc/{process}/status").read_text()
                memory += int(status.split("VmRSS:")[1].split()[0]) // 1024
                files += len(os.listdir(f"/proc/{process}/fd"))
        return memory, files, len(family)

    def kill_a_worker(self) -> bool:
        """Of the drafter's, if there is one."""
        workers = [p for p in self.family()[1:] if b"hf_specdec" in _command_of(p)]
        if workers:
            with suppress(ProcessLookupError):
                os.kill(random.choice(workers), signal.SIGKILL)
        return bool(workers)


def _command_of(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def expected(target: str) -> dict[str, list[int]]:
    """Questions, and what plain decoding answers, with its end."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config.do_sample = False
    answers = {}
    for i in range(QUESTIONS):
        question = f"Question {i}: what are {i + 2} and {3 * i + 1}, and why?"
        inputs = tokenizer(question, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=LENGTHS[1], do_sample=False, pad_token_id=0)
        answers[question] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return answers


class Clients:
    """They ask until they are told to stop."""

    def __init__(self, server: Server, answers: dict[str, list[int]]) -> None:
        self.server, self.answers = server, answers
        self.tokenizer = AutoTokenizer.from_pretrained(server.name)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.over = threading.Event()

    def ask(self, seed: int) -> None:
        """One after the other."""
        dice, client = random.Random(seed), self.server.client
        while not self.over.is_set():
            question, most = dice.choice(list(self.answers)), dice.randint(*LENGTHS)
            options: dict[str, Any] = {
                "model": self.server.name,
                "prompt": question,
                "max_tokens": most,
                "temperature": 0,
            }
            try:
                self._one(client, dice, options, self.answers[question][:most])
            except OpenAIError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _one(self, client: Any, dice: random.Random, options: dict[str, Any], expected: list[int]) -> None:
        if dice.random() < HANGS_UP:
            stream = client.completions.create(**options, stream=True)
            for _, _ in zip(range(dice.randint(0, 6)), stream, strict=False):
                pass
            stream.close()
            self.counts["hung up"] += 1
            return
        said = client.completions.create(**options)
        self.counts["answered"] += 1
        if said.choices[0].text != self.tokenizer.decode(expected, skip_special_tokens=True):
            self.wrong.append(f"{options['prompt']!r}, {options['max_tokens']}: {said.choices[0].text!r}")


def main(
    serve: Annotated[list[str], Argument(help="Of hf-specdec serve.")],
    minutes: Annotated[float, Option(help="How long.")] = 30.0,
    clients: Annotated[int, Option(help="At once.")] = 6,
    kill_every: Annotated[float, Option(help="Seconds between two workers' deaths; 0 for none.")] = 60.0,
) -> None:
    """Load, watch, end."""
    console, server = Console(highlight=False), Server(serve)
    load = Clients(server, expected(server.name))
    threads = [threading.Thread(target=load.ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    began = killed_at = time.monotonic()
    told = 0
    while (passed := time.monotonic() - began) < 60 * minutes and server.process.poll() is None:
        time.sleep(1)
        if kill_every and time.monotonic() - killed_at > kill_every:
            load.counts["workers killed"] += server.kill_a_worker()
            killed_at = time.monotonic()
        if passed >= told * 60 * minutes / SAMPLES:
            told += 1
            memory, files, processes = server.held()
            console.print(
                f"{passed / 60:.1f} min: {memory} MiB, {files} files, {processes} processes, {dict(load.counts)}"
            )
    load.over.set()
    for thread in threads:
        thread.join()
    family = server.family()
    server.process.terminate()
    server.process.wait(60)
    time.sleep(2)
    left = [process for process in family if Path(f"/proc/{process}").exists()]
    console.print(
        f"{dict(load.counts)}; wrong: {len(load.wrong)}; ended with {server.process.returncode}; left: {left}"
    )
    console.print(server.lines[-1])
    for line in load.wrong[:5]:
        console.print(line, markup=False)


if __name__ == "__main__":
    run(main)
