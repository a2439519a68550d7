"""Ways to decode that take turns at every prompt, so that drift of the machine falls on all alike."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from hf_specdec import SpeculationStats
from hf_specdec.tools.instruments.ends import until_end
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.prompts import Prompt


@dataclass(kw_only=True)
class Way:
    """One way to decode, and what it came to."""

    drafter: Any = None
    """None for plain decoding"""
    tokens: int = 0
    seconds: float = 0.0
    accepted: int = 0
    steps: int = 0

    @property
    def per_call(self) -> float:
        """Tokens per row and verification."""
        return 1 + self.accepted / max(1, self.steps)

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    def count(self, stats: SpeculationStats) -> None:
        """What one call's statistics add."""
        self.accepted += stats.accepted_tokens
        self.steps += stats.row_steps


def take_turns(
    target: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    ways: Sequence[Way],
    max_new_tokens: int,
    batch_size: int = 1,
    title: str = "decoding",
) -> None:
    """Decode every batch of prompts greedily, each way in turn; a first round, which is not counted, warms up."""
    groups = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for number, group in enumerate(tqdm([groups[0], *groups], desc=title, unit="batch")):
        inputs = batch([prompt_ids(tokenizer, prompt) for prompt in group], tokenizer.pad_token_id, target.device)
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            kwargs = {} if way.drafter is None else {"assistant_model": way.drafter}
            began = time.perf_counter()
            output = target.generate(**inputs, **options, **kwargs)
            seconds = time.perf_counter() - began
            if number == 0:
                continue
            way.seconds += seconds
            way.tokens += sum(len(until_end(target, ids)) for ids in output[:, inputs["input_ids"].shape[1] :].tolist())
            if way.drafter is not None:
                way.count(way.drafter.last_stats)
