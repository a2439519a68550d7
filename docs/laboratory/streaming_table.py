"""A table like Speculative Streaming's Tables 1 and 2: tokens per call, speed-up, task metric, parameters.

    python docs/laboratory/streaming_table.py --target smollm2 --pack-linear --prompts TEST --tuned STREAMS \\
        --lora LORA --lora-streams STREAMS --medusa HEADS --drafter hub_configs/hybrid --drafter prompt_lookup

TEST holds prompts with answers, such as those that were trained on. Each target is loaded anew: as it is, tuned by a
LoRA alone, and tuned together with its streams. `--untouched` and `--lora-streams` are streams that leave the first and
the second untouched, `--medusa` heads of the second. Methods take turns at each prompt; plain decoding of the same
target is 1. Rouge is rouge_score's F1 against the best of a prompt's answers, `exact` the number behind #### (GSM8K).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm
from typer import Option

from hf_specdec import Drafter, StreamingDrafter, pack_linear
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.drafters import load_drafter
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import Prompt, sample_examples
from in_turn import Way, take_turns
from medusa import Medusa, MedusaDrafter


@dataclass(kw_only=True)
class TableSettings(PairSettings):
    """What is compared."""

    prompts: Annotated[str, Option(help="JSON lines with prompts and answers.")]
    tuned: Annotated[str | None, Option(help="Streams that tune the target.")] = None
    untouched: Annotated[str | None, Option(help="Streams that leave it as it is.")] = None
    lora: Annotated[str | None, Option(help="A LoRA without streams.")] = None
    lora_streams: Annotated[str | None, Option(help="Streams that leave the target of this LoRA untouched.")] = None
    medusa: Annotated[str | None, Option(help="Folder of Medusa-style heads for it.")] = None
    drafter: Annotated[list[str], Option(help="Further drafters, on each target.")] = field(default_factory=list)
    metric: Annotated[Literal["rouge", "exact"], Option(help="Of the task.")] = "rouge"
    limit: Annotated[int, Option(help="Prompts.")] = 40
    max_new_tokens: Annotated[int, Option(help="Per answer.")] = 96
    batch_size: Annotated[int, Option(help="Prompts answered together.")] = 1
    scored: Annotated[int, Option(help="Prompts whose answers are scored, decoded 48 at once.")] = 200


@dataclass(kw_only=True)
class Row(Way):
    """One method."""

    method: str
    parameters: int = 0


def main(settings: TableSettings) -> None:
    """Decode and print."""
    answers = answers_to(settings.prompts)
    table = Table(
        "target", "method", "tokens per call", "speed-up", "metric", "extra parameters", title=settings.prompts
    )
    targets: dict[str, tuple[str | None, str | None]] = {"as it is": (None, settings.untouched)}
    targets |= {"LoRA": (settings.lora, settings.lora_streams)} if settings.lora else {}
    targets |= {"tuned with streams": (settings.tuned, settings.tuned)} if settings.tuned else {}
    for name, (tuned_by, streams) in targets.items():
        for row, speed, metric in measured(settings, name, tuned_by, streams, answers):
            found = "" if metric is None else " / ".join(f"{value:.3f}" for value in metric)
            table.add_row(name, row.method, f"{row.per_call:.2f}", f"{speed:.2f}", found, f"{row.parameters:,}")
    Console(width=140).print(table)


def answers_to(file: str) -> dict[Prompt, list[str]]:
    """The file's prompts as questions, each with all of its answers."""
    answers: dict[Prompt, list[str]] = {}
    for prompt, answer in sample_examples(file, None, 0, split="test"):
        answers.setdefault(replace(prompt, chat=True), []).append(answer)
    return answers


def measured(
    settings: TableSettings, name: str, tuned_by: str | None, folder: str | None, answers: dict[Prompt, list[str]]
) -> list[tuple[Row, float, tuple[float, ...] | None]]:
    """All methods on one target: the row, its speed-up and its metric."""
    pair = replace(settings, pack_linear=False).load()
    model, tokenizer = pair.target, pair.tokenizer
    if tuned_by is not None:
        StreamingDrafter.from_pretrained(tuned_by).tune(model)
    if settings.pack_linear:
        pack_linear(model)
    rows = [Row(method="plain")]
    if folder is not None:
        streams, alone = (StreamingDrafter.from_pretrained(folder, copies=copies) for copies in (True, False))
        size = sum(p.numel() for p in streams.streams.parameters())
        rows.append(Row(method="streams", drafter=alone, parameters=size))
        rows.append(Row(method="streams and copies", drafter=streams, parameters=size))
    if name == "LoRA" and settings.medusa is not None:
        weights = torch.load(f"{settings.medusa}/medusa.pt")
        heads = Medusa(model.config.hidden_size, sum(".weight" in key for key in weights), weights["known"])
        heads.load_state_dict(weights)
        size = sum(p.numel() for p in heads.parameters())
        rows.append(Row(method="Medusa heads", drafter=MedusaDrafter(heads, model), parameters=size))
    for spec in settings.drafter:
        drafter: Drafter = load_drafter(spec, pair.draft, target=model, **settings.of_drafts())
        draft: Any = getattr(drafter, "draft_model", None)
        size = 0 if draft is None else draft.num_parameters()
        rows.append(Row(method=drafter.config.drafter_type, drafter=drafter, parameters=size))
    prompts = list(answers)
    metric = scored(settings, model, tokenizer, prompts[: settings.scored], answers)
    title = f"{name}: decoding"
    take_turns(model, tokenizer, prompts[: settings.limit], rows, settings.max_new_tokens, settings.batch_size, title)
    return [(row, row.speed / rows[0].speed, metric if row is rows[0] else None) for row in rows]


def scored(
    settings: TableSettings, model: Any, tokenizer: Any, prompts: Sequence[Prompt], answers: dict[Prompt, list[str]]
) -> tuple[float, ...]:
    """The task's metric of the target's own greedy answers."""
    said: list[str] = []
    options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for at in tqdm(range(0, len(prompts), 48), desc="answers to score"):
        rows = [prompt_ids(tokenizer, prompt) for prompt in prompts[at : at + 48]]
        inputs = batch(rows, tokenizer.pad_token_id, model.device)
        output = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
        said += tokenizer.batch_decode(output, skip_special_tokens=True)
    if settings.metric == "exact":
        numbers = [[_number(text) for text in answers[prompt]] for prompt in prompts]
        return (mean(_number(text) in right for text, right in zip(said, numbers, strict=True)),)
    scorer = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    found = [scorer.score_multi(answers[prompt], text) for prompt, text in zip(prompts, said, strict=True)]
    return tuple(mean(one[kind].fmeasure for one in found) for kind in ("rouge1", "rougeLsum"))


def _number(text: str) -> str:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text.split("####")[-1])
    return found[0 if "####" in text else -1].replace(",", "").rstrip(".") if found else ""


if __name__ == "__main__":
    command(main, None, __doc__)()
