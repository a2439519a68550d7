"""`hf-specdec tune`: record once, replay every choice, run the best for real, keep the evidence beside the winner."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer import Option

from ...errors import SpeculationError
from ...hub.cards import with_measured
from ...hub.measured import markdown
from ...hub.registry import drafter_class
from ...target.devices import input_device
from ..bench.decoding import decode
from ..bench.methods import PLAIN, Method, build_method
from ..instruments.provenance import provenance
from ..loading.chat import batch, prompt_ids
from ..loading.checks import check_decoding, check_tokens
from ..loading.drafters import config_of, load_drafter
from ..loading.models import Pair, PairSettings
from ..loading.outputs import writable_folder
from ..loading.prompts import Prompt, load_prompts
from ..loading.rows import PROMPT_SOURCES, set_name
from ..showing import quiet
from .recorded import Stage, record

FINALISTS = 3
WORTH_IT = 1.03
"""times plain decoding's speed that the winner must have: the best of three looks better than it is"""
COPIES = (
    *(f"prompt_lookup:tokens_per_match={n},num_branches={m}" for m in (1, 3) for n in (2, 4, 10)),
    *(f"suffix:num_branches={m}" for m in (1, 3)),
)
DRAFTS = (
    *(f"draft_model:num_draft_tokens={n}" for n in (1, 2, 3, 4, 6, 8)),
    *(f"draft_model:num_candidates={k}" for k in (1, 3)),
    *(f"hybrid:num_candidates={k},num_branches={m}" for k in (1, 4) for m in (1, 3)),
    *(f"hybrid:num_draft_tokens={n}" for n in (2, 4)),
)
ALONE = "hybrid"
"""what is tried where nothing is named: `COPIES`, and with a draft model `DRAFTS`, without one the hybrid `ALONE`"""
REPLAYED = ("prompt_lookup", "suffix", "draft_model", "hybrid")
"""types whose drafts follow from the text and from what the draft model says of it"""

_decoding: Any = partial(Option, rich_help_panel="Prompts and decoding")


@dataclass(kw_only=True)
class TuneSettings(PairSettings):
    """What to choose from, and for which prompts."""

    prompts: Annotated[list[str], Option(help=f"Prompts: {PROMPT_SOURCES}; may be given several times.")]
    output: Annotated[Path, Option(help="New folder for the drafter.")]
    drafters: Annotated[
        list[str] | None,
        Option("--drafter", help=f"Choice: TYPE:KEY=VALUE,... of {', '.join(REPLAYED)}; default: 9, with --draft 22."),
    ] = None
    max_new_tokens: Annotated[int, _decoding(help="New tokens per prompt, at most.")] = 128
    limit: Annotated[int | None, _decoding(help="Take only this many prompts of each source.")] = 8
    raw: Annotated[bool, _decoding("--raw", help="Continue chats as plain text, without the chat template.")] = False
    system: Annotated[str | None, _decoding(help="System message for chats that have none.")] = None

    def choices(self) -> list[str]:
        """
        Raises:
            SpeculationError: one that cannot be replayed, has a bad option, or lacks its draft model.
        """
        chosen = list(dict.fromkeys(self.drafters or ((*COPIES, ALONE) if self.draft is None else (*COPIES, *DRAFTS))))
        for spec in chosen:
            if spec.partition(":")[0] not in REPLAYED:
                raise SpeculationError(
                    f"drafter must be one of {', '.join(REPLAYED)}, with options, got {spec!r}; compare others with "
                    "`hf-specdec bench`"
                )
            config_of(spec)
            if drafter_class(spec.partition(":")[0]).needs_draft_model and self.draft is None:
                raise SpeculationError(f"{spec!r} needs a draft model; name one with --draft")
        return chosen


@dataclass
class Found:
    """A choice, and how many times as fast as plain decoding it is."""

    spec: str
    replayed: float
    measured: float | None = None
    """None where it was not run"""
    tokens_per_call: float | None = None

    def cells(self) -> list[str]:
        """For tables; see `HEADER`."""
        told = ["", ""] if self.measured is None else [f"{self.measured:.2f}x", f"{self.tokens_per_call:.2f}"]
        return [self.spec, f"{self.replayed:.2f}x", *told]


HEADER = ("drafter", "replayed", "measured", "tokens per call")


def run_tune(settings: TuneSettings) -> list[Found]:
    """Find the fastest drafter and write its folder, unless plain decoding is as fast; all choices, the best first.

    Raises:
        SpeculationError: a setting, a model or a file that does not work.
    """
    check_decoding(settings.max_new_tokens)
    choices, console = settings.choices(), Console(highlight=False)
    prompts = [prompt for source in settings.prompts for prompt in load_prompts(source, settings.limit)]
    writable_folder(settings.output)
    if (settings.output / "config.json").exists():
        raise SpeculationError(f"output {str(settings.output)!r} holds a drafter already; name a new folder")
    with quiet():
        pair = settings.load()
        found, seconds = search(pair, [_ids(pair, settings, prompt) for prompt in prompts], choices, settings)
        table = Table(box=None)
        for name in HEADER:
            table.add_column(name, overflow="fold")
        for one in found:
            table.add_row(*one.cells())
        console.print(table)
        best = found[0]
        assert best.measured is not None
        if best.measured < WORTH_IT:
            console.print(f"nothing beats plain decoding here: the best, {best.spec}, runs at {best.measured:.2f}x")
            return found
        _keep(settings, pair, found, seconds)
    console.print(f"{best.spec} runs at {best.measured:.2f}x; it is in {settings.output}", markup=False)
    return found


def _ids(pair: Pair, settings: TuneSettings, prompt: Prompt) -> list[int]:
    """Of its first turn."""
    ids = prompt_ids(pair.tokenizer, prompt, settings.raw, settings.system)
    check_tokens(torch.tensor(ids), prompt.turns[0])
    return ids


def search(
    pair: Pair, prompts: Sequence[list[int]], choices: Sequence[str], settings: TuneSettings
) -> tuple[list[Found], dict[str, dict[int, float]]]:
    """All choices, those that were run first, the fastest before the others; and seconds of forwards by width."""
    new = settings.max_new_tokens
    recordings = [record(pair, ids, new) for ids in tqdm(prompts, "recording", unit="prompt")]
    stage = Stage(pair, [one for one in recordings if len(one.text) > 1] or recordings)
    plain = stage.play(None)
    found = [
        Found(spec, plain / stage.play(load_drafter(spec, stage.draft)))
        for spec in tqdm(choices, "replaying", unit="choice")
    ]
    found.sort(key=lambda one: -one.replayed)
    finalists = found[:FINALISTS]
    methods = [Method(PLAIN), *(build_method(one.spec, pair.draft, target=pair.target) for one in finalists)]
    times, lengths = _race(pair, prompts[::2], methods, new)
    for one, seconds, length in zip(finalists, times[1:], lengths[1:], strict=True):
        one.measured, one.tokens_per_call = times[0] / seconds, length
    finalists.sort(key=lambda one: -(one.measured or 0.0))
    return [*finalists, *found[FINALISTS:]], stage.seconds


def _race(
    pair: Pair, prompts: Sequence[list[int]], methods: Sequence[Method], new_tokens: int
) -> tuple[list[float], list[float]]:
    """Seconds of each method, and its tokens per call; they take turns at every prompt, after one that warms up."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": pair.tokenizer.pad_token_id}
    seconds, lengths = [0.0] * len(methods), [0.0] * len(methods)
    for number, ids in enumerate(tqdm([prompts[0], *prompts], "running", unit="prompt")):
        inputs = batch([ids], pair.tokenizer.pad_token_id, input_device(pair.target))
        short = {"max_new_tokens": min(16, new_tokens)} if number == 0 else {}
        for turn in range(len(methods)):
            at = (turn + number) % len(methods)
            made = decode(pair.target, methods[at], inputs, **options | short)
            if number:
                seconds[at] += made.meter.seconds
                lengths[at] += made.mean_acceptance_length / len(prompts)
    return seconds, lengths


def _keep(settings: TuneSettings, pair: Pair, found: Sequence[Found], seconds: dict[str, dict[int, float]]) -> None:
    """The winner's folder: the drafter, `tune.json`, and both in words in its card."""
    folder = settings.output
    load_drafter(found[0].spec, pair.draft).save_pretrained(folder, target=pair.target, tokenizer=pair.tokenizer)
    told = provenance(input_device(pair.target)) | {"settings": asdict(settings) | {"output": str(folder)}}
    content = {"found": [asdict(one) for one in found], "forward_seconds": seconds, "provenance": told}
    (folder / "tune.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    card = folder / "README.md"
    card.write_text(with_measured(card.read_text(encoding="utf-8"), "\n\n".join(_evidence(settings, found, seconds))))


def _evidence(settings: TuneSettings, found: Sequence[Found], seconds: dict[str, dict[int, float]]) -> Iterator[str]:
    """For the card."""
    sources = ", ".join(map(set_name, settings.prompts))
    yield (
        f"Chosen by `hf-specdec tune` among {len(found)} for {sources} ({settings.max_new_tokens} new tokens at most, "
        "greedy, one row). Each was replayed on recorded texts and measured forwards, without what drafting takes "
        "on the host; the best were then run on every second prompt, in turns with plain decoding."
    )
    yield markdown(HEADER, [one.cells() for one in found])
    for role, times in seconds.items():
        widths = ", ".join(f"{width}: {each / times[1]:.2f}" for width, each in times.items())
        yield f"A forward of the {role} takes {1e3 * times[1]:.1f} ms; by tokens per row, in that unit: {widths}."
