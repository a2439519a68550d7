"""A table like Speculative Streaming's Tables 1 and 2: tokens per call, speed-up, task metric, parameters.

    python docs/laboratory/streaming_table.py --target smollm2 --pack-linear --prompts TEST --tuned STREAMS \\
        --lora LORA --lora-streams STREAMS --drafter hub_configs/hybrid --drafter prompt_lookup

TEST holds prompts with answers, such as those that were trained on. Each target is loaded anew: as it is, tuned by a
LoRA alone, and tuned together with its streams. `--untouched` and `--lora-streams` are streams that leave the text of
the first and of the second as it is. Methods take turns at each prompt; plain decoding of the same target is 1. Rouge
is rouge_score's F1 against the best of a prompt's answers, `exact` compares the number behind #### (GSM8K).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import mean
from typing import Annotated, Literal

from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm
from typer import Option

from hf_specdec import StreamingDrafter, pack_linear
from hf_specdec.commands.options import command
from hf_specdec.tools.bench.decoding import decode
from hf_specdec.tools.bench.methods import PLAIN, Method
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.drafters import load_drafter, own_model
from hf_specdec.tools.loading.models import Pair, PairSettings
from hf_specdec.tools.loading.prompts import Prompt, sample_examples
from shared import Way, drafted, show, take_turns

AT_ONCE = 48
"""answers that are scored are written in batches of so many"""


@dataclass(kw_only=True)
class TableSettings(PairSettings):
    """What is compared."""

    prompts: Annotated[str, Option(help="JSON lines or a data set with prompts and answers.")]
    tuned: Annotated[str | None, Option(help="Streams that tune the target.")] = None
    untouched: Annotated[list[str], Option(help="Streams that leave it as it is.")] = field(default_factory=list)
    lora: Annotated[str | None, Option(help="A LoRA without streams.")] = None
    lora_streams: Annotated[list[str], Option(help="Streams that leave the target of this LoRA untouched.")] = field(
        default_factory=list
    )
    drafter: Annotated[list[str], Option(help="Further drafters, on each target.")] = field(default_factory=list)
    metric: Annotated[Literal["rouge", "exact"], Option(help="Of the task.")] = "rouge"
    limit: Annotated[int, Option(help="Prompts.")] = 40
    max_new_tokens: Annotated[int, Option(help="Per answer.")] = 96
    scored: Annotated[int, Option(help="Prompts whose answers are scored.")] = 200


@dataclass(kw_only=True)
class Row(Way):
    """One method."""

    parameters: int = 0


def main(settings: TableSettings) -> None:
    """Decode and print."""
    answers: dict[Prompt, list[str]] = {}
    for prompt, answer in sample_examples(settings.prompts, None, 0, split="test"):
        answers.setdefault(replace(prompt, chat=True), []).append(answer)
    targets: dict[str, tuple[str | None, list[str]]] = {"as it is": (None, settings.untouched)}
    targets |= {"LoRA": (settings.lora, settings.lora_streams)} if settings.lora else {}
    targets |= {"tuned with streams": (settings.tuned, [settings.tuned])} if settings.tuned else {}
    lines = []
    for name, (tuned_by, streams) in targets.items():
        pair = replace(settings, pack_linear=False).load()
        if tuned_by is not None:
            StreamingDrafter.from_pretrained(tuned_by).tune(pair.target)
        if settings.pack_linear:
            pack_linear(pair.target)
        rows = rows_of(settings, pair, streams)
        score = " / ".join(f"{value:.3f}" for value in scores(settings, pair, answers))
        take_turns(pair, list(answers)[: settings.limit], rows, settings.max_new_tokens)
        for row in rows:
            figures = (f"{row.per_call:.2f}", f"{row.speed / rows[0].speed:.2f}", f"{row.parameters:,}")
            lines.append((name, row.method.name, *figures, score if row is rows[0] else ""))
    show(("target", "method", "tokens per call", "speed-up", "extra parameters", settings.metric), lines)


def rows_of(settings: TableSettings, pair: Pair, streams: list[str]) -> list[Row]:
    """Plain decoding, the streams without and with other sources, and further drafters."""
    rows = [Row(method=Method(PLAIN))]
    for folder, (joined, copies) in product(streams, (("", False), (", with other sources", True))):
        drafter = StreamingDrafter.from_pretrained(folder, copies=copies)
        size = sum(p.numel() for p in drafter.streams.parameters())
        rows.append(Row(method=drafted(folder + joined, drafter), parameters=size))
    for spec in settings.drafter:
        further = load_drafter(spec, pair.draft, target=pair.target, **settings.of_drafts())
        draft = own_model(further)
        size = 0 if draft is None else draft.num_parameters()
        rows.append(Row(method=drafted(spec, further), parameters=size))
    return rows


def scores(settings: TableSettings, pair: Pair, answers: dict[Prompt, list[str]]) -> Sequence[float]:
    """The task's metric of the target's own greedy answers."""
    tokenizer, said = pair.tokenizer, list[str]()
    prompts = list(answers)[: settings.scored]
    options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for at in tqdm(range(0, len(prompts), AT_ONCE), desc="answers to score"):
        ids = [prompt_ids(tokenizer, prompt) for prompt in prompts[at : at + AT_ONCE]]
        inputs = batch(ids, tokenizer.pad_token_id, pair.target.device)
        made = decode(pair.target, Method(PLAIN), inputs, **options)
        said += tokenizer.batch_decode(made.rows, skip_special_tokens=True)
    if settings.metric == "exact":
        numbers = [[_number(text) for text in answers[prompt]] for prompt in prompts]
        return (mean(_number(text) in right for text, right in zip(said, numbers, strict=True)),)
    scorer = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=True)
    found = [scorer.score_multi(answers[prompt], text) for prompt, text in zip(prompts, said, strict=True)]
    return [mean(one[kind].fmeasure for one in found) for kind in ("rouge1", "rougeLsum")]


def _number(text: str) -> str:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text.split("####")[-1])
    return found[0 if "####" in text else -1].replace(",", "").rstrip(".") if found else ""


if __name__ == "__main__":
    command(main, None, __doc__)()
