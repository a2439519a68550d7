"""Rows that come and go against batches that wait for their last row, under one load of mixed lengths.

Run as `python docs/laboratory/continuous.py --target smollm2 --pack-linear --prompts chat ...`.
Prompts are pieces of the files' text, lengths are spread evenly by their logarithm. The ways to serve the load:

- `static`: as many requests as there are rows, and the next ones when all of these have ended;
- `joined`: all requests at once, without a drafter;
- `drafted`: the same with a drafter;
- `adversary`: the same with a drafter that is always wrong.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
from typer import Option

from hf_specdec import BatchDecoder, Drafter
from hf_specdec.commands.options import command
from hf_specdec.protocol import Draft, DraftContext, Sequences
from hf_specdec.serve.threads import apart
from hf_specdec.session import DraftSession
from hf_specdec.tools.loading.drafters import DrafterSettings
from hf_specdec.tools.loading.models import Pair
from hf_specdec.tools.loading.prompts import load_prompts
from shared import show

WAYS = ("static", "joined", "drafted", "adversary")
NO_END = 3
"""a token that is never written: texts are as long as they are asked to be"""
WRONG = 5
"""tokens that the adversary drafts"""

Request = tuple[list[int], int]
"""a prompt, and how many tokens to write"""


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
    seed: Annotated[int, Option(help="Of lengths and pieces.")] = 0


class Adversary(Drafter):
    """Always wrong."""

    def start(self, context: DraftContext) -> DraftSession:
        return Wrong(context)


class Wrong(DraftSession):
    """Drafts a token that hardly ever comes."""

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        return Draft.from_lists([[1] * min(WRONG, most) for most in room])


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more will come."""

    def gaps(self) -> list[float]:
        """Seconds between tokens; the prompt, which comes first, is left out."""
        return [b - a for a, b in pairwise(self.times[1:])]


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


def serve(
    model: Any, requests: Sequence[Request], rows: int, drafter: Drafter | None, together: int
) -> tuple[float, list[float], float]:
    """Seconds, gaps between tokens and tokens per call of a `BatchDecoder` that is given so many requests at a time."""
    clocks: list[Clock] = []
    began = time.perf_counter()
    with BatchDecoder(model, drafter, max_rows=rows, max_tokens=1 << 20) as decoder:
        for first in range(0, len(requests), together):
            answers = []
            for ids, new in requests[first : first + together]:
                clocks.append(Clock())
                options = {"max_new_tokens": new, "eos_token_id": NO_END, "do_sample": False}
                answers.append(decoder.submit(ids, streamer=clocks[-1], **options))
            for answer in answers:
                answer.result()
    gaps = sorted(gap for clock in clocks for gap in clock.gaps())
    return time.perf_counter() - began, gaps, decoder.stats.mean_acceptance_length


def loaded(settings: LoadSettings) -> tuple[Pair, Drafter]:
    """Models and drafter, as the server loads them."""
    pair = settings.load()
    return pair, settings.load_drafter(pair)


def main(settings: LoadSettings) -> None:
    """One way after the other."""
    pair, drafter = apart(lambda: loaded(settings))
    requests, rows = load_of(settings, pair.tokenizer), settings.rows
    prompts, answers = sum(len(ids) for ids, _ in requests), sum(new for _, new in requests)
    print(f"{len(requests)} requests, {prompts:,} tokens of prompts, {answers:,} to write, {rows} rows")
    ways: dict[str, tuple[Drafter | None, int]] = {
        "static": (None, rows),
        "joined": (None, len(requests)),
        "drafted": (drafter, len(requests)),
        "adversary": (Adversary(), len(requests)),
    }
    serve(pair.target, requests[:rows], rows, drafter, rows)  # what only first calls do
    lines = []
    for way in settings.ways:
        seconds, gaps, per_call = serve(pair.target, requests, rows, *ways[way])
        p95 = gaps[int(0.95 * len(gaps))]
        lines.append((way, f"{answers / seconds:.1f}", f"{seconds:.0f}", f"{1000 * p95:.0f}", f"{per_call:.2f}"))
    show(("way", "tokens/s", "seconds", "p95 between tokens, ms", "tokens per call and row"), lines)


if __name__ == "__main__":
    command(main, None, __doc__)()
