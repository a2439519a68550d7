"""Rows that come and go against batches that wait for their last row, under one load of mixed lengths.

Run as `python docs/laboratory/continuous.py --target smollm2 --pack-linear --prompts chat ...`.
Prompts are pieces of the files' text, lengths are spread evenly by their logarithm. The ways to serve the load:

- `static`: as many requests as there are rows, and the next ones when all of these have ended;
- `joined`: a `BatchDecoder`, without a drafter, with one, and with one that is always wrong;
- `stock`: transformers' own continuous batching.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig
from typer import Option

from hf_specdec import BatchDecoder, Drafter
from hf_specdec.commands.options import command
from hf_specdec.protocol import Draft, DraftContext, DraftSession, Sequences
from hf_specdec.serve.threads import apart
from hf_specdec.tools.loading.drafters import DrafterSettings
from hf_specdec.tools.loading.models import Pair
from hf_specdec.tools.loading.prompts import load_prompts

WAYS = ("static", "joined", "drafted", "adversary", "stock")
NO_END = 3
"""a token that is never written: texts are as long as they are asked to be"""
WRONG = 5
"""tokens that the adversary drafts"""


@dataclass(kw_only=True)
class LoadSettings(DrafterSettings):
    """A load, and who serves it."""

    target: Annotated[str, Option(help="As every command takes it.")] = "smollm2"
    prompts: Annotated[list[str], Option(help="Files whose text prompts are pieces of.")] = field(default_factory=list)
    ways: Annotated[list[str], Option("--way", help="Of those above.")] = field(default_factory=lambda: list(WAYS))
    requests: Annotated[int, Option(help="Requests, all there from the start.")] = 256
    rows: Annotated[int, Option(help="Decoded at once.")] = 16
    longest_prompt: Annotated[int, Option(help="Tokens; the shortest has 16.")] = 1500
    longest_answer: Annotated[int, Option(help="Tokens; the shortest has 8.")] = 256
    check: Annotated[bool, Option(help="Also decode every request alone, and compare.")] = False
    seed: Annotated[int, Option(help="Of lengths and pieces.")] = 0


class Adversary(Drafter):
    """Always wrong."""

    def start(self, context: DraftContext) -> DraftSession:
        return Wrong(context)


class Wrong(DraftSession):
    """Drafts a token that hardly ever comes."""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        return Draft.from_lists([[1] * min(WRONG, room) for room in budget], self.context.device)


Request = tuple[list[int], int]
"""a prompt, and how many tokens to write"""


def load_of(settings: LoadSettings, tokenizer: Any) -> list[Request]:
    """Requests of mixed lengths."""
    dice = random.Random(settings.seed)
    texts = ["\n".join(prompt.turns) for path in settings.prompts for prompt in load_prompts(path)]
    dice.shuffle(texts)
    tokens = tokenizer("\n\n".join(texts))["input_ids"]

    def length(least: int, most: int) -> int:
        return round(math.exp(dice.uniform(math.log(least), math.log(most))))

    requests = []
    for _ in range(settings.requests):
        n = length(16, settings.longest_prompt)
        start = dice.randrange(max(1, len(tokens) - n))
        requests.append((tokens[start : start + n], length(8, settings.longest_answer)))
    return requests


@dataclass
class Served:
    """What became of the load."""

    seconds: float
    texts: list[list[int]]
    gaps: list[float]
    """seconds between two moments at which a request got tokens"""
    tokens_per_call: float = 0.0

    @property
    def speed(self) -> float:
        """New tokens per second."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def p95(self) -> float:
        """Seconds between tokens that 95% do not exceed."""
        return sorted(self.gaps)[int(0.95 * len(self.gaps))] if self.gaps else 0.0


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more will come."""

    def gaps(self) -> list[float]:
        """Between the tokens, the prompt being no one."""
        return [b - a for a, b in pairwise(self.times[1:])]


def joined(model: Any, requests: Sequence[Request], rows: int, drafter: Drafter | None, together: int) -> Served:
    """By a `BatchDecoder`, which is given so many requests at a time."""
    clocks, texts = [], []
    began = time.perf_counter()
    with BatchDecoder(model, drafter, max_rows=rows, max_tokens=1 << 20) as decoder:
        for first in range(0, len(requests), together):
            answers = []
            for ids, new in requests[first : first + together]:
                clocks.append(Clock())
                options = {"max_new_tokens": new, "eos_token_id": NO_END, "do_sample": False}
                answers.append(decoder.submit(ids, streamer=clocks[-1], **options))
            texts += [answer.result() for answer in answers]
    seconds = time.perf_counter() - began
    return Served(seconds, texts, [g for clock in clocks for g in clock.gaps()], decoder.stats.mean_acceptance_length)


def stock(model: Any, requests: Sequence[Request]) -> Served:
    """By transformers' own manager."""
    longest = max(new for _, new in requests)
    config = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=NO_END, pad_token_id=0)
    began = time.perf_counter()
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for i, (ids, new) in enumerate(requests):
            manager.add_request(ids, request_id=str(i), max_new_tokens=new, eos_token_id=NO_END)
        while len(found) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' manager has ended")
    return Served(time.perf_counter() - began, [found[str(i)] for i in range(len(requests))], [], 1.0)


def alone(model: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Each by itself, plainly."""
    texts = []
    for ids, new in requests:
        options = {"max_new_tokens": new, "eos_token_id": NO_END, "do_sample": False, "pad_token_id": 0}
        texts.append(model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist())
    return texts


def loaded(settings: LoadSettings) -> tuple[Pair, Drafter]:
    """As the server does it."""
    pair = settings.load()
    return pair, settings.load_drafter(pair)


def main(settings: LoadSettings) -> None:
    """One way after the other."""
    pair, drafter = apart(lambda: loaded(settings))
    model = pair.target
    requests = load_of(settings, pair.tokenizer)
    prompts, answers = sum(len(ids) for ids, _ in requests), sum(new for _, new in requests)
    console, rows = Console(), settings.rows
    console.print(f"{len(requests)} requests, {prompts:,} tokens of prompts, {answers:,} to write, {rows} rows")
    ways = {
        "static": lambda: joined(model, requests, rows, None, rows),
        "joined": lambda: joined(model, requests, rows, None, len(requests)),
        "drafted": lambda: joined(model, requests, rows, drafter, len(requests)),
        "adversary": lambda: joined(model, requests, rows, Adversary(), len(requests)),
        "stock": lambda: stock(model, requests),
    }
    joined(model, requests[:rows], rows, drafter, rows)  # what only first calls do
    expected = alone(model, requests) if settings.check else None
    table = Table("way", "tokens/s", "seconds", "p95 between tokens, ms", "tokens per call and row", "same text")
    for way in settings.ways:
        served = ways[way]()
        same = ""
        if expected is not None:
            same = f"{sum(a == b for a, b in zip(served.texts, expected, strict=True))} of {len(requests)}"
        times = f"{served.speed:.1f}", f"{served.seconds:.1f}", f"{1000 * served.p95:.0f}"
        table.add_row(way, *times, f"{served.tokens_per_call:.2f}", same)
        console.print(way, *times, same)
    console.print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
