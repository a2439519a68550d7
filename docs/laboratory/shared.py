"""What the scripts beside this share: ways to decode that take turns at every prompt, and tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_specdec.tools.bench.decoding import Generation, decode
from hf_specdec.tools.bench.methods import Method
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import Pair
from hf_specdec.tools.loading.prompts import Prompt


@dataclass(kw_only=True)
class Way:
    """One way to decode, and what it came to."""

    method: Method
    tokens: int = 0
    seconds: float = 0.0
    """of whole calls, prefill included"""
    calls: int = 0
    """forwards of the target"""
    accepted: int = 0
    verified: Counter[int] = field(default_factory=Counter)
    """how often the i-th token of a draft, from 0, was verified"""
    steps: int = 0
    same: int = 0
    """batches whose texts are those of the first way"""

    @property
    def per_call(self) -> float:
        """Tokens per row and verification."""
        return 1 + self.accepted / max(1, self.steps)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def count(self, made: Generation) -> None:
        """Add one call."""
        self.tokens += made.stats.emitted_tokens
        self.seconds += made.meter.seconds
        self.calls += len(made.meter.of("target"))
        self.accepted += made.stats.accepted_tokens
        self.verified.update(made.stats.drafted_per_position)
        self.steps += made.stats.row_steps


def take_turns(
    pair: Pair, prompts: Sequence[Prompt], ways: Sequence[Way], max_new_tokens: int, batch_size: int = 1
) -> int:
    """Decode all prompts greedily by all ways in turn, so that drift of the machine falls on all alike.

    A first batch warms up and is not counted. Returns the number of batches.
    """
    groups = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
    pad = pair.tokenizer.pad_token_id
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
    for number, group in enumerate(tqdm([groups[0], *groups], desc="decoding", unit="batch")):
        inputs = batch([prompt_ids(pair.tokenizer, prompt) for prompt in group], pad, pair.target.device)
        first = number % len(ways)
        turns = [*ways[first:], *ways[:first]]
        made = {id(way): decode(pair.target, way.method, inputs, **options) for way in turns}
        for way in ways if number else ():
            way.count(made[id(way)])
            way.same += made[id(way)].rows == made[id(ways[0])].rows
    return len(groups)


def drafted(name: str, drafter: Any) -> Method:
    """The method that decodes with a drafter of this package."""
    return Method(name, {"assistant_model": drafter}, drafter=drafter)


def show(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, figures to the right."""
    table = Table(box=None)
    for name in header:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
