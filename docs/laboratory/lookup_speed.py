"""Time of one prompt-lookup round by context length, beside transformers' own.

Run as `python docs/laboratory/lookup_speed.py`. A round is what a drafter does for one row: take in the accepted
tokens, then propose. Our time stays flat as the context grows; a search through the whole context does not.
"""

import random
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.protocol import Sequences, Verdict

LENGTHS = (1_000, 3_000, 10_000, 30_000, 100_000, 200_000)
ROUNDS = 300
ACCEPTED = 3
"""Tokens that each round adds to the context."""


def synthetic_text(length: int, seed: int = 0, vocab: int = 8_192) -> list[int]:
    """Phrases of 4 to 30 tokens, some heard before: text with matches of every length."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        phrase = rng.randint(4, 30)
        if len(tokens) > 100 and rng.random() < 0.5:
            start = rng.randrange(len(tokens) - phrase)
            tokens += tokens[start : start + phrase]
        else:
            tokens += [int(vocab ** rng.random()) - 1 for _ in range(phrase)]  # few tokens are frequent
    return tokens[:length]


class OurRounds:
    """A prompt-lookup session over one context."""

    def __init__(self, context: list[int], future: list[int]) -> None:
        self.tokens, self.future = list(context), future
        host: Any = SimpleNamespace(
            eos_token_ids=frozenset(), vocab_size=1 << 30, trees=False, device="cpu", forbids=None
        )
        self.session = PromptLookupDrafter().start(host)
        self.session.propose(self._sequences(), [1])  # indexes the context

    def _sequences(self) -> Sequences:
        return Sequences(torch.zeros(1, 0, dtype=torch.long), [len(self.tokens)], [0], [self.tokens])

    def play(self, i: int) -> float:
        """Seconds of one round."""
        new = self.future[i * ACCEPTED : (i + 1) * ACCEPTED]
        self.tokens.extend(new)
        sequences = self._sequences()
        began = time.perf_counter()
        self.session.observe(Verdict([0], [16], [len(new) - 1], [new], [False], 17, 0.0))
        self.session.propose(sequences, [16])
        return time.perf_counter() - began


class TheirRounds:
    """transformers' candidate generator with its defaults over one context."""

    def __init__(self, context: list[int], future: list[int]) -> None:
        self.length, self.ids = len(context), torch.tensor([context + future])
        self.generator = PromptLookupCandidateGenerator(max_length=1 << 30)

    def play(self, i: int) -> float:
        """Seconds of one round."""
        began = time.perf_counter()
        self.generator.get_candidates(self.ids[:, : self.length + (i + 1) * ACCEPTED])
        return time.perf_counter() - began


def measure(kind: type[OurRounds] | type[TheirRounds], rounds: int) -> list[float]:
    """Median microseconds per round at each of `LENGTHS`, which take turns so that they share what else happens."""
    contexts = []
    for length in LENGTHS:
        text = synthetic_text(length + ROUNDS * ACCEPTED)
        contexts.append(kind(text[:length], text[length:]))
    times = [[context.play(i) for context in contexts] for i in range(rounds)]
    return [median(column) * 1e6 for column in zip(*times, strict=True)]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    ours, theirs = measure(OurRounds, ROUNDS), measure(TheirRounds, ROUNDS // 5)
    table = Table("context", "ours µs", "transformers µs")
    for length, mine, other in zip(LENGTHS, ours, theirs, strict=True):
        table.add_row(f"{length:,}", f"{mine:.0f}", f"{other:.0f}")
    Console().print(table)
    Console().print(f"ours, largest over smallest: {max(ours) / min(ours):.2f}")


if __name__ == "__main__":
    main()
