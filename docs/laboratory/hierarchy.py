"""A draft model that reads ahead: how many forwards of it are left, and whether it drafts the same.

Run as `python docs/laboratory/hierarchy.py --target smollm2 --draft hub_configs/draft_model/draft_model --prompts
chat --prompts summaries`, with `--smaller FOLDER` for a smaller model in place of
copies. Every prompt is decoded twice, one behind the other: the draft step by step, and reading ahead.
"""

from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer import Option

from hf_specdec import DraftModelDrafter, SpeculationError, read_ahead
from hf_specdec.commands.options import command
from hf_specdec.hub.draft import load_draft
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name


@dataclass(kw_only=True)
class HierarchySettings(PairSettings):
    """What is drafted."""

    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")] = field(
        default_factory=list
    )
    limit: Annotated[int, Option(help="Prompts of each.")] = 10
    smaller: Annotated[str | None, Option(help="Folder of a smaller model; copies where there is none.")] = None
    window: Annotated[int, Option(help="γ.")] = 6
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0


def measure(settings: HierarchySettings) -> None:
    """Print the table."""
    pair = settings.load()
    if (draft := pair.draft) is None:
        raise SpeculationError("a hierarchy needs a draft model; name one with --draft")
    smaller = None if settings.smaller is None else load_draft(Path(settings.smaller), pack_linear=settings.pack_linear)
    ahead = copy(draft)  # the same weights
    read_ahead(ahead, smaller)
    table = Table(box=None)
    for title in ("prompts", "drafted", "forwards", "reading ahead", "share", "share of drafting time", "same text"):
        table.add_column(title, justify="right")
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.temperature > 0}
    options |= {"temperature": settings.temperature} if settings.temperature else {}
    for path in settings.prompts:
        drafted, same = 0, 0
        calls, seconds = [0, 0], [0.0, 0.0]
        prompts = load_prompts(path, settings.limit)
        for prompt in tqdm(prompts, desc=set_name(path), unit="prompt"):
            inputs = batch([prompt_ids(pair.tokenizer, prompt)], pair.tokenizer.pad_token_id)
            texts = []
            for i, model in enumerate((draft, ahead)):
                torch.manual_seed(0)
                drafter = DraftModelDrafter(model, num_draft_tokens=settings.window)
                texts.append(pair.target.generate(**inputs, **options, assistant_model=drafter))
                assert drafter.last_stats is not None
                calls[i] += drafter.last_stats.draft_calls
                seconds[i] += drafter.last_stats.draft_seconds
                drafted += drafter.last_stats.drafted_tokens * i
            same += torch.equal(*texts)
        shares = f"{calls[1] / calls[0]:.2f}", f"{seconds[1] / seconds[0]:.2f}", f"{same} of {len(prompts)}"
        table.add_row(set_name(path), str(drafted), *map(str, calls), *shares)
    Console().print(table)


if __name__ == "__main__":
    command(measure, None, __doc__)()
