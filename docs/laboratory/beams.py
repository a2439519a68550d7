"""Beam search with a draft's beams: how many calls of the target it takes, and whether its sequences are the same.

Run as `python docs/laboratory/beams.py --target smollm2 --dtype float32 --draft hub_configs/draft_model/draft_model
--prompts sentences`. Calls are counted; sequences and scores are compared with plain beam search's.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tqdm import tqdm
from typer import Option

from hf_specdec import DraftModelDrafter, SpeculationError
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from shared import show


@dataclass(kw_only=True)
class BeamSettings(PairSettings):
    """What is searched."""

    prompts: Annotated[str, Option(help="File, set or data set, as for `hf-specdec bench`.")]
    limit: Annotated[int, Option(help="Prompts.")] = 200
    widths: Annotated[list[int], Option("--beams", help="w; may be given several times.")] = field(
        default_factory=lambda: [2, 4, 8]
    )
    window: Annotated[int, Option(help="γ, steps that the draft's beams look ahead.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 32


def main(settings: BeamSettings) -> None:
    """Print the table."""
    pair = settings.load()
    if pair.draft is None:
        raise SpeculationError("beams need a draft model; name one with --draft")
    pad = pair.tokenizer.pad_token_id
    prompts = [prompt_ids(pair.tokenizer, prompt) for prompt in load_prompts(settings.prompts, settings.limit)]
    rows = []
    for beams in settings.widths:
        same, steps, calls, apart = 0, 0, 0, 0.0
        options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "num_beams": beams, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": pad}
        for ids in tqdm(prompts, desc=f"{beams} beams", unit="prompt"):
            inputs, drafter = batch([ids], pad), DraftModelDrafter(pair.draft, num_draft_tokens=settings.window)
            plain = pair.target.generate(**inputs, **options)
            ours = pair.target.generate(**inputs, **options, assistant_model=drafter)
            assert drafter.last_stats is not None
            same += torch.equal(ours.sequences, plain.sequences)
            apart = max(apart, float((ours.sequences_scores - plain.sequences_scores).abs().max()))
            steps += 1 + drafter.last_stats.plain_steps
            calls += drafter.last_stats.target_calls
        rows.append((beams, len(prompts), same, f"{apart:.1e}", steps, calls, f"{steps / calls:.2f}"))
    show(("beams", "prompts", "same sequences", "score difference", "steps", "calls", "steps / call"), rows)


if __name__ == "__main__":
    command(main, None, __doc__)()
