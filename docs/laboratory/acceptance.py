"""How often drafts are right on what a target writes, all asked at the same places.

Run as `python docs/laboratory/acceptance.py --target smollm2 --dtype float32 --draft BEFORE --draft AFTER --prompts
code --limit 12`, which compares a draft before and after `lighten.py`. The target answers the prompts
greedily and at temperature 1. Where it wrote a token, each draft says what it would have drafted behind the same text.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from typer import Option

from hf_specdec.commands.options import command
from hf_specdec.tools.instruments.ends import until_end
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import ModelSource, Pair, TargetSettings, load_model
from hf_specdec.tools.loading.prompts import sample_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.tools.loading.sampling import sampling_at

FIGURES = ("greedy", "tokens per round", "T=1")


@dataclass(kw_only=True)
class AcceptanceSettings(TargetSettings):
    """What drafts, and what for."""

    draft: Annotated[list[str], Option(help="Folder of a draft model; may be given several times.")]
    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line; several times, too.")]
    limit: Annotated[int, Option(help="Prompts per file.")] = 12
    longest: Annotated[int, Option(help="Tokens that a prompt may have; others are left out.")] = 400
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    window: Annotated[int, Option(help="γ.")] = 4
    seed: int = 0


def answers(pair: Pair, prompts: list[list[int]], temperature: float, most: int) -> list[list[int]]:
    """What the target writes behind each prompt."""
    inputs = batch(prompts, pair.tokenizer.pad_token_id, pair.target.device)
    options = {"max_new_tokens": most, "pad_token_id": pair.tokenizer.pad_token_id, **sampling_at(temperature)}
    written = pair.target.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    return [until_end(pair.target, row) for row in written.tolist()]


@torch.no_grad()
def logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """[N, V] what decides each token of the answer."""
    ids = torch.tensor([prompt + answer], device=model.device)
    return model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()


def rounds(right: list[bool], window: int) -> list[int]:
    """Tokens that each round of γ drafted ones gains along a text, the target's own included."""
    gained, at = [], 0
    while at < len(right):
        accepted = 0
        while accepted < window and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        gained.append(accepted + 1)
        at += accepted + 1
    return gained


def measure(settings: AcceptanceSettings) -> None:
    """Print a row per file and draft, and the means over the files."""
    pair = settings.load()
    drafts = [load_model(ModelSource(name, settings.dtype, settings.device)) for name in settings.draft]
    table, means = Table("prompts", "draft", "places", *FIGURES), defaultdict[str, list[list[float]]](list)
    for file in settings.prompts:
        ids = [prompt_ids(pair.tokenizer, prompt) for prompt in sample_prompts(file, None, settings.seed)]
        asked = [prompt for prompt in ids if len(prompt) <= settings.longest][: settings.limit]
        torch.manual_seed(settings.seed)
        greedy, drawn = (answers(pair, asked, temperature, settings.max_new_tokens) for temperature in (0.0, 1.0))
        chances = [logits(pair.target, *both).softmax(-1) for both in zip(asked, drawn, strict=True)]
        for name, draft in zip(settings.draft, drafts, strict=True):
            right = [
                (logits(draft, prompt, text).argmax(-1).cpu() == torch.tensor(text)).tolist()
                for prompt, text in zip(asked, greedy, strict=True)
            ]
            overlap = [
                torch.minimum(p, logits(draft, prompt, text).softmax(-1)).sum(-1)
                for p, prompt, text in zip(chances, asked, drawn, strict=True)
            ]
            gained = [tokens for text in right for tokens in rounds(text, settings.window)]
            places = sum(map(len, right))
            found = [sum(map(sum, right)) / places, sum(gained) / len(gained), float(torch.cat(overlap).mean())]
            means[name].append(found)
            table.add_row(set_name(file), name, str(places), *_shown(found))
    for name, rows in means.items():
        table.add_row("mean", name, "", *_shown([sum(column) / len(column) for column in zip(*rows, strict=True)]))
    Console(width=120).print(table)


def _shown(found: list[float]) -> list[str]:
    greedy, gained, overlap = found
    return [f"{greedy:.2%}", f"{gained:.3f}", f"{overlap:.2%}"]


if __name__ == "__main__":
    command(measure, None, __doc__)()
