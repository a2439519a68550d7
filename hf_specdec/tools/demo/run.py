"""`hf-specdec demo`: a real model answers real prompts, plainly, with transformers' own speculation and with ours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from typer import Option

from ...clock import now
from ...errors import SpeculationError
from ..bench.decoding import Generation, decode
from ..bench.measure import Bench
from ..bench.method import Method
from ..bench.methods import PLAIN, build_method
from ..bench.plan import Unit, settings_of
from ..instruments.recording import RecordingDrafter
from ..loading.checks import Range
from ..loading.drafters import DrafterSettings, own_model
from ..loading.models import Pair
from ..loading.prompts import Prompt
from ..showing import check_page, page, quiet
from .live import LiveText, legend
from .prompts import BATCH, SAMPLES
from .table import differences, said_of_texts, table
from .turns import Turns, inputs_of

ASSISTED, LOOKUP, OURS = "hf assisted", "hf lookup", "hf_specdec"
NEXT = """Your own model:

    import hf_specdec
    model, tokenizer = hf_specdec.load("your/model")
    inputs = tokenizer("Your prompt", return_tensors="pt").to(model.device)
    model.generate(**inputs, max_new_tokens=64, speculation_type="auto")
"""


@dataclass(kw_only=True)
class DemoSettings(DrafterSettings):
    """What to show, and with which models."""

    target: Annotated[str, Option(help="Model to speed up: a folder, a Hub repo, a GGUF file, or smollm2.")] = "smollm2"
    beside: Annotated[list[str], Option(help="Another drafter to compare with; may be given several times.")] = field(
        default_factory=list
    )
    max_new_tokens: Annotated[int, Option(help="New tokens per prompt, at most."), Range(1)] = 64
    seconds: Annotated[
        float,
        Option(
            help="Seconds from the loaded models to the table. Methods take turns, prompt by prompt, until they are "
            "over; plain decoding and ours take one in any case."
        ),
    ] = 60.0
    output: Annotated[
        Path | None, Option("--output", "--svg", help="Save answers and table as a page (.html) or a picture (.svg).")
    ] = None

    def __post_init__(self) -> None:
        """On a CPU all methods run on packed weights: with plain ones, forwards of several tokens cost too much."""
        super().__post_init__()
        self.pack_linear |= self.can_pack

    def check(self) -> None:
        """
        Raises:
            SpeculationError: a value out of range, or a picture that cannot be saved.
        """
        super().check()
        if not 0 < self.seconds < math.inf:
            raise SpeculationError(
                f"seconds must be above 0 and finite, got {self.seconds}; give some, as --seconds 60"
            )
        check_page(self.output)


def run_demo(settings: DemoSettings) -> None:
    """Show answers as they are written, then decode the same prompts by all methods and print what was gained.

    Raises:
        SpeculationError: a model or drafter that does not load, or a setting that nothing can be shown with.
    """
    settings.check()
    console = Console(highlight=False)
    with quiet():
        with console.status("loading the models"):
            pair = settings.load()
            methods = _methods(settings, pair)
            recorder = RecordingDrafter(settings.load_drafter(pair))
        ends = now() + settings.seconds
        introduction = _introduction(settings, pair, recorder)
        console.print(introduction)
        chosen = settings_of(settings, max_new_tokens=settings.max_new_tokens)
        bench = Bench(chosen, pair, [methods])  # one drafter, which learns as it does for its user
        ones = [_unit(kind, [question]) for kind, question in SAMPLES.items()]
        together = _unit(f"batch {len(BATCH)}", BATCH)
        if LiveText(console, pair.tokenizer).coloured:
            console.print("\n", legend(), sep="")
        answers = [_show_one(console, bench, recorder, unit) for unit in ones]
        _show_batch(console, bench, recorder, together)
        turns = Turns(bench, ends)
        _measure(console, turns, [*ones, together])
        gained = table(methods, turns.taken)
        console.rule(style="dim")
        console.print(gained)
        for line in said_of_texts(differences(bench, turns.taken)):
            console.print(line, markup=False)
        console.print(f"\n{NEXT}", markup=False)
    if settings.output is not None:
        with page(settings.output, "hf-specdec demo") as picture:
            picture.print(introduction, Text(), legend(), sep="\n")
            for unit, answer in zip(ones, answers, strict=True):
                picture.rule(unit.dataset, style="dim")
                picture.print(Text(unit.prompts[0].turns[0], style="dim"), Text(), answer, sep="\n")
            picture.rule(style="dim")
            picture.print(gained)


def _methods(settings: DemoSettings, pair: Pair) -> list[Method]:
    """Plain decoding and ours first; transformers' assisted decoding where there is a draft model."""
    drafter = settings.load_drafter(pair)
    draft = own_model(drafter) or pair.draft
    assisted = [] if draft is None else [_named(ASSISTED, build_method("hf-assisted", draft))]
    lookup = _named(LOOKUP, build_method("hf-prompt-lookup", None))
    loading = settings.of_drafts() | {"target": pair.target}
    beside = [build_method(spec, pair.draft, **loading) for spec in dict.fromkeys(settings.beside)]
    ours = Method(OURS, {"assistant_model": drafter}, draft, drafter)
    return [Method(PLAIN), ours, *assisted, lookup, *beside]


def _named(name: str, method: Method) -> Method:
    method.name = name
    return method


def _unit(kind: str, questions: Sequence[str]) -> Unit:
    return Unit(kind, 0, len(questions), 0.0, [Prompt((question,), chat=True) for question in questions])


def _introduction(settings: DemoSettings, pair: Pair, ours: RecordingDrafter) -> Text:
    draft = own_model(ours.inner)
    drafts = f"{draft.num_parameters() / 1e6:.0f} M parameters" if draft is not None else "no model"
    dtype = str(pair.target.dtype).removeprefix("torch.") + (", packed" if settings.pack_linear else "")
    return Text(
        f"Target: {settings.target}, {pair.target.num_parameters() / 1e6:.0f} M parameters, "
        f"{dtype}, {torch.get_num_threads()} CPU threads. "
        f"Drafter: {ours.config.drafter_type}, {drafts}. Greedy, {settings.max_new_tokens} new tokens at most."
    )


def _show_one(console: Console, bench: Bench, recorder: RecordingDrafter, unit: Unit) -> Text:
    """Our answer as it is written."""
    console.rule(unit.dataset, style="dim")
    console.print(unit.prompts[0].turns[0], style="dim", end="\n\n", markup=False, soft_wrap=True)
    live = LiveText(console, bench.tokenizer)
    recorder.told = live.told
    _decode(bench, recorder, unit, streamer=live)
    recorder.told = None
    return live.written


def _show_batch(console: Console, bench: Bench, recorder: RecordingDrafter, unit: Unit) -> None:
    """Our answers to questions that are asked together."""
    console.rule(unit.dataset, style="dim")
    made = _decode(bench, recorder, unit)
    for prompt, row in zip(unit.prompts, made.rows, strict=True):
        answer = bench.tokenizer.decode(row, skip_special_tokens=True)
        console.print(prompt.turns[0], style="dim", markup=False)
        console.print(answer, end="\n\n", markup=False, soft_wrap=True)


def _decode(bench: Bench, recorder: RecordingDrafter, unit: Unit, **options: Any) -> Generation:
    inputs = inputs_of(bench, unit)
    method = Method(OURS, {"assistant_model": recorder}, None, recorder)
    return decode(bench.target, method, inputs, **bench.options(unit) | options)


def _measure(console: Console, turns: Turns, units: Sequence[Unit]) -> None:
    """Turns under a bar that says what is left; Ctrl-C ends them, and what was measured counts."""
    total = max(turns.left, 0.0)
    with tqdm(total=total, bar_format="measuring {bar} {n:.0f} of {total:.0f} s", leave=False) as bar:
        try:
            for _ in turns.take(units):
                bar.update(total - max(turns.left, 0.0) - bar.n)
        except KeyboardInterrupt:
            console.print("stopped; this was measured before", style="dim")
