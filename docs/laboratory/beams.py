"""Beam search with a draft's beams: how many calls of the target it takes, and whether its sequences are the same.

Run as `python docs/laboratory/beams.py --target smollm2 --dtype float32 --draft hub_configs/draft_model/draft_model
--prompts sentences`. Calls are counted, and sequences and scores held against plain beam search's.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer import Option

from hf_specdec import DraftModelDrafter, SpeculationError
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts


@dataclass(kw_only=True)
class BeamSettings(PairSettings):
    """What is searched."""

    prompts: Annotated[str, Option(help="JSON lines, or text with a prompt per line.")]
    limit: Annotated[int, Option(help="Prompts.")] = 200
    widths: Annotated[list[int], Option("--beams", help="w; may be given several times.")] = field(
        default_factory=lambda: [2, 4, 8]
    )
    window: Annotated[int, Option(help="γ, steps that the draft's beams go on.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 32


def measure(settings: BeamSettings) -> None:
    """Print the table."""
    pair = settings.load()
    if pair.draft is None:
        raise SpeculationError("beams need a draft model; name one with --draft")
    prompts = [prompt_ids(pair.tokenizer, prompt) for prompt in load_prompts(settings.prompts, settings.limit)]
    table = Table(box=None)
    for title in (
        "beams",
        "prompts",
        "same sequences",
        "largest difference of scores",
        "steps",
        "calls",
        "steps / call",
    ):
        table.add_column(title, justify="right")
    for beams in settings.widths:
        same = steps = calls = 0
        apart = 0.0
        options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "num_beams": beams, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": pair.tokenizer.pad_token_id}
        for ids in tqdm(prompts, desc=f"{beams} beams", unit="prompt"):
            inputs = batch([ids], pair.tokenizer.pad_token_id)
            plain = pair.target.generate(**inputs, **options)
            drafter = DraftModelDrafter(pair.draft, num_draft_tokens=settings.window)
            ours = pair.target.generate(**inputs, **options, assistant_model=drafter)
            assert drafter.last_stats is not None
            same += torch.equal(ours.sequences, plain.sequences)
            apart = max(apart, float((ours.sequences_scores - plain.sequences_scores).abs().max()))
            steps, calls = steps + 1 + drafter.last_stats.plain_steps, calls + drafter.last_stats.target_calls
        cells = (beams, len(prompts), same, f"{apart:.1e}", steps, calls, f"{steps / calls:.2f}")
        table.add_row(*map(str, cells))
    Console().print(table)


if __name__ == "__main__":
    command(measure, None, __doc__)()
