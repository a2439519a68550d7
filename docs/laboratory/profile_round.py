"""What a round costs beside its bare forwards: `python docs/laboratory/profile_round.py`.

A target and a draft decode the demo's prompts; then every kind of forward that was made is run
alone over a cache of the same length. What the rounds took above that is the loop's own.
"""

import statistics
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec.demo.prompts import SAMPLES
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.instruments.bare import bare_seconds, decode_forwards, time_bare_forwards
from hf_specdec.instruments.meter import Role, metered
from hf_specdec.loading.chat import ask
from hf_specdec.loading.models import PairSettings

GAMMA = 5
"""tokens drafted per round"""


@dataclass
class Profile:
    """Seconds of all rounds of one generation."""

    rounds: int
    total: float
    """rounds from beginning to end, prefills left out"""
    drafting: float
    """in the draft's forwards, as they ran in the loop"""
    verifying: float
    """in the target's forwards, likewise"""
    bare_drafting: float
    """the same forwards alone"""
    bare_verifying: float

    @property
    def overhead(self) -> float:
        """What the rounds took above their bare forwards, as a share of those."""
        return self.total / (self.bare_drafting + self.bare_verifying) - 1


def profile(target: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> Profile:
    """Decode ids [1, P] greedily with γ = 5, then time the forwards alone."""
    drafter = DraftModelDrafter(draft, num_draft_tokens=GAMMA)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "assistant_model": drafter}
    target.generate(ids, max_new_tokens=8, **arguments)
    with metered(target, draft) as meter:
        output = target.generate(ids, max_new_tokens=new_tokens, **arguments)
    models: dict[Role, PreTrainedModel] = {"target": target, "draft": draft}
    table = time_bare_forwards(models, meter.forwards, output)

    def bare(role: Role) -> float:
        return bare_seconds(meter.of(role), table)

    return Profile(
        rounds=len(decode_forwards(meter.of("target"))),
        total=meter.decode_seconds,
        drafting=meter.total("draft"),
        verifying=meter.total("target"),
        bare_drafting=bare("draft"),
        bare_verifying=bare("target"),
    )


def main(
    target: Annotated[str, typer.Option(help="Folder or Hub repo.")] = "smollm2",
    draft: Annotated[str, typer.Option(help="Folder or Hub repo.")] = "hub_configs/draft_model/draft_model",
    repeats: Annotated[int, typer.Option(help="Generations per prompt; the median overhead counts.")] = 3,
    new_tokens: Annotated[int, typer.Option(help="Tokens per generation.")] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Print a round's time and where it goes, prompt by prompt."""
    pair = PairSettings(target=target, draft=draft, device="cpu", threads=threads).load()
    assert pair.draft is not None
    table = Table(
        "prompt", "rounds", "round", "drafting", "bare", "verifying", "bare", "elsewhere", "overhead", box=None
    )
    overheads = []
    for sample in SAMPLES:
        ids = torch.tensor([ask(pair.tokenizer, sample.text)])
        profiles = sorted(
            (profile(pair.target, pair.draft, ids, new_tokens) for _ in range(repeats)), key=lambda p: p.overhead
        )
        p = profiles[len(profiles) // 2]
        overheads.append(p.overhead)
        per_round = [
            1000 * seconds / p.rounds
            for seconds in (p.total, p.drafting, p.bare_drafting, p.verifying, p.bare_verifying)
        ]
        total, drafting, bare_drafting, verifying, bare_verifying = per_round
        table.add_row(
            sample.kind,
            str(p.rounds),
            f"{total:.1f}",
            f"{drafting:.1f}",
            f"{bare_drafting:.1f}",
            f"{verifying:.1f}",
            f"{bare_verifying:.1f}",
            f"{total - drafting - verifying:.1f}",
            f"{p.overhead:+.1%}",
        )
    console = Console()
    console.print(f"milliseconds per round; bfloat16, CPU threads: {threads}, greedy, γ = {GAMMA}")
    console.print(table)
    console.print(f"median overhead of a round over its bare forwards: {statistics.median(overheads):+.1%}")


if __name__ == "__main__":
    typer.run(main)
