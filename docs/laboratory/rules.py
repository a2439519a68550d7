"""What rules of verification accept: tokens per call of one draft model under each of them, at a temperature.

Run as `python docs/laboratory/rules.py --target smollm2 --pack-linear --draft hub_configs/draft_model/draft_model
--prompts chat`. A count, not a time; each rule has the same prompts and windows, and seeds of its own.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer import Option

from hf_specdec import DraftModelDrafter, SpeculationError, SpeculationStats
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.sampling import sampling_at

RULES: dict[str, dict[str, Any]] = {
    "token by token": {"verification": "token"},
    "block": {},
    "coupled": {"sampling": "coupled"},
    "lenience 0.5": {"lenience": 0.5},
    "lenience 0.3": {"lenience": 0.3},
    "lenience 0.1": {"lenience": 0.1},
}


@dataclass(kw_only=True)
class RulesSettings(PairSettings):
    """What is written."""

    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")]
    limit: Annotated[int, Option(help="Prompts of each file.")] = 16
    rows: Annotated[int, Option(help="Of those as many at once.")] = 8
    windows: Annotated[list[int], Option("--window", help="γ; may be given several times.")] = field(
        default_factory=lambda: [3, 5, 8]
    )
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 96
    temperature: Annotated[float, Option(help="0 is greedy, where lenience alone applies.")] = 1.0


def measure(settings: RulesSettings) -> None:
    """Print the table."""
    pair = settings.load()
    if pair.draft is None:
        raise SpeculationError("rules need a draft model; name one with --draft")
    ids = [
        prompt_ids(pair.tokenizer, prompt) for file in settings.prompts for prompt in load_prompts(file, settings.limit)
    ]
    batches = [ids[i : i + settings.rows] for i in range(0, len(ids), settings.rows)]
    sampled = settings.temperature > 0
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens} | sampling_at(settings.temperature)
    rules = {name: rule for name, rule in RULES.items() if sampled or name == "block" or name.startswith("lenience")}
    table = Table(box=None)
    table.add_column("")
    for window in settings.windows:
        table.add_column(f"γ = {window}", justify="right")
    table.add_column("accepted, γ = " + str(settings.windows[0]), justify="right")
    for name, rule in tqdm(rules.items(), unit="rule"):
        found: list[SpeculationStats] = []
        for window in settings.windows:
            total = SpeculationStats()
            for number, rows in enumerate(batches):
                drafter = DraftModelDrafter(pair.draft, num_draft_tokens=window)
                torch.manual_seed(number)
                inputs = batch(rows, pair.tokenizer.pad_token_id)
                pair.target.generate(
                    **inputs, **options, pad_token_id=pair.tokenizer.pad_token_id, assistant_model=drafter,
                    speculation=rule,
                )  # fmt: skip
                assert drafter.last_stats is not None
                total += drafter.last_stats
            found.append(total)
        cells = [f"{stats.mean_acceptance_length:.2f}" for stats in found]
        table.add_row(name, *cells, f"{found[0].draft_acceptance_rate:.2f}")
    Console().print(table)


if __name__ == "__main__":
    command(measure, None, __doc__)()
