"""What PEARL gains by drafting for corrections.

    python docs/laboratory/pearl_corrections.py --target TARGET --draft DRAFT --prompts FILE

Rounds of greedy texts are counted in set times, as in `pearl_windows.py`: a draft step takes 1, a target forward the
ratio, at any width. γ is the ratio.
"""

from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from hf_specdec import PearlDrafter
from hf_specdec.commands.options import expanded
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from pearl_bounds import pearl_seconds
from pearl_windows import SetTimes


@dataclass
class Settings(SetTimes):
    """Options of the command."""

    corrections: Annotated[list[int], typer.Option(help="For each token; repeat for several.")] = field(
        default_factory=lambda: [1, 4]
    )
    limit: Annotated[int, typer.Option(help="Prompts per source.")] = 8


@dataclass
class Count:
    """What all texts of a source took."""

    tokens: int = 0
    seconds: float = 0.0
    """in draft steps, without the target's prefill"""
    rejected: int = 0
    """tokens; each has a correction"""
    foreseen: int = 0
    """corrections that a draft was ready for, for the next round"""


def count(pair: Any, inputs: list[Any], c: int, corrections: int, new: int) -> Count:
    """Every text by itself."""
    counted = Count()
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": pair.tokenizer.pad_token_id}
    for x in inputs:
        with closing(PearlDrafter(pair.draft, window=c, corrections=corrections, worker="thread")) as drafter:
            text = pair.target.generate(**x, **options, assistant_model=drafter)
        line = drafter.last_timeline
        assert line is not None
        assert torch.equal(text, pair.target.generate(**x, **options))
        rejected, foreseen = map(sum, zip(*line.corrections, strict=True))
        counted.tokens += text.shape[1] - x["input_ids"].shape[1] - 1
        counted.seconds += pearl_seconds(line, c, c, 1.0)
        counted.rejected += rejected
        counted.foreseen += foreseen
    return counted


def run(settings: Settings) -> None:
    """Speeds over plain decoding in set times."""
    pair = PairSettings(target=settings.target, draft=settings.draft, dtype="float32", threads=1).load()
    kinds = [0, *settings.corrections]
    typer.echo("| prompts | c |" + "".join(f" {n} |" for n in kinds))
    typer.echo("|---" * (2 + len(kinds)) + "|")
    for source in settings.prompts:
        prompts = load_prompts(source, settings.limit)
        inputs = [batch([prompt_ids(pair.tokenizer, prompt)], pair.tokenizer.pad_token_id) for prompt in prompts]
        for c in settings.ratio:
            cells = []
            for kind in kinds:
                found = count(pair, inputs, c, kind, settings.max_new_tokens)
                speed = c * found.tokens / found.seconds
                cells.append(f"{speed:.2f} ({found.foreseen} of {found.rejected})")
            typer.echo(f"| {set_name(source)} | {c} | {' | '.join(cells)} |")


main = expanded(run)

if __name__ == "__main__":
    typer.run(main)
