"""`hf-specdec demo`: a real model answers real prompts, plainly, with transformers' own speculation and with ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from typer import Option

from ...drafters import Drafter
from ...errors import SpeculationError
from ..bench.decoding import Generation, decode
from ..bench.measure import Bench
from ..bench.methods import PLAIN, Method, build_method
from ..bench.plan import Unit, settings_of
from ..bench.results import Results
from ..instruments.recording import RecordingDrafter
from ..loading.checks import check_decoding
from ..loading.drafters import DEFAULT, SPEC, load_drafter, own_model
from ..loading.models import Pair, PairSettings
from ..loading.outputs import writable_file
from ..loading.prompts import Prompt
from ..showing import quiet
from .live import LiveText, Pictured, aside, legend
from .prompts import BATCH, SAMPLES

REPEATS = 3
ASSISTED, LOOKUP, OURS = "hf assisted", "hf lookup", "hf_specdec"
NEXT = """Your own model:

    import hf_specdec
    model, tokenizer = hf_specdec.load("your/model")
    inputs = tokenizer("Your prompt", return_tensors="pt").to(model.device)
    model.generate(**inputs, max_new_tokens=64, speculation_type="auto")
"""


@dataclass(kw_only=True)
class DemoSettings(PairSettings):
    """What to show, and with which models."""

    target: Annotated[str, Option(help="Model to speed up: a folder, a Hub repo, a GGUF file, or smollm2.")] = "smollm2"
    drafter: Annotated[
        str | None,
        Option(help=f"Drafter: {SPEC}. Default: {DEFAULT}."),
    ] = None
    beside: Annotated[list[str], Option(help="Another drafter to compare with; may be given several times.")] = field(
        default_factory=list
    )
    max_new_tokens: Annotated[int, Option(help="New tokens per prompt, at most.")] = 64
    output: Annotated[
        str | None, Option("--output", "--svg", help="Save the answers and the table as a picture (SVG).")
    ] = None

    def __post_init__(self) -> None:
        """On a CPU all methods run on packed weights: with plain ones, forwards of several tokens cost too much."""
        super().__post_init__()
        self.pack_linear |= self.can_pack

    def load_ours(self, pair: Pair) -> Drafter:
        """The drafter that is shown."""
        return load_drafter(self.drafter or DEFAULT, pair.draft, target=pair.target, **self.of_drafts())


def run_demo(settings: DemoSettings) -> None:
    """Show answers as they are written, then decode the same prompts by all methods and print what was gained.

    Raises:
        SpeculationError: a model or drafter that does not load, or a setting that nothing can be shown with.
    """
    check_decoding(settings.max_new_tokens)
    if settings.output is not None:
        writable_file(settings.output, "output")
    console = Console(highlight=False) if settings.output is None else Pictured()
    with quiet():
        with console.status("loading the models"):
            pair = settings.load()
            passes = [_methods(settings, pair)] * REPEATS  # one drafter, which learns as it does for its user
            recorder = RecordingDrafter(settings.load_ours(pair))
        console.print(_introduction(settings, pair, recorder), markup=False)
        chosen = settings_of(settings, max_new_tokens=settings.max_new_tokens, repeats=REPEATS)
        bench, results = Bench(chosen, pair, passes), Results({})
        ones = [_unit(kind, [question]) for kind, question in SAMPLES.items()]
        together = _unit(f"batch {len(BATCH)}", BATCH)
        if LiveText(console, pair.tokenizer).coloured:
            console.print("\n", legend(), sep="")
        for unit in ones:
            _show_one(console, bench, recorder, unit)
        with aside(console):
            _show_batch(console, bench, recorder, together)
        with console.status("measuring: all methods in turn"):
            bench.run(results, [*ones, together])
        console.rule(style="dim")
        console.print(table(results.runs))
        with aside(console):
            for line in said_of_texts(results.runs):
                console.print(line, markup=False)
            console.print(f"\n{NEXT}", markup=False)
    if settings.output is not None:
        console.save_svg(settings.output, title="hf-specdec demo")


def _methods(settings: DemoSettings, pair: Pair) -> list[Method]:
    """Plain decoding first, ours last; transformers' assisted decoding where there is a draft model."""
    drafter = settings.load_ours(pair)
    draft = own_model(drafter) or pair.draft
    assisted = [] if draft is None else [_named(ASSISTED, build_method("hf-assisted", draft))]
    lookup = _named(LOOKUP, build_method("hf-prompt-lookup", None))
    loading = settings.of_drafts() | {"target": pair.target}
    beside = [build_method(spec, pair.draft, **loading) for spec in dict.fromkeys(settings.beside)]
    return [Method(PLAIN), *assisted, lookup, *beside, Method(OURS, {"assistant_model": drafter}, draft, drafter)]


def _named(name: str, method: Method) -> Method:
    method.name = name
    return method


def _unit(kind: str, questions: Sequence[str]) -> Unit:
    return Unit(kind, 0, len(questions), 0.0, [Prompt((question,), chat=True) for question in questions])


def _introduction(settings: DemoSettings, pair: Pair, ours: RecordingDrafter) -> str:
    draft = own_model(ours.inner)
    drafts = f"{draft.num_parameters() / 1e6:.0f} M parameters" if draft is not None else "no model"
    dtype = str(pair.target.dtype).removeprefix("torch.") + (", packed" if settings.pack_linear else "")
    return (
        f"Target: {settings.target}, {pair.target.num_parameters() / 1e6:.0f} M parameters, "
        f"{dtype}, {torch.get_num_threads()} CPU threads. "
        f"Drafter: {ours.config.drafter_type}, {drafts}. Greedy, {settings.max_new_tokens} new tokens at most."
    )


def _show_one(console: Console, bench: Bench, recorder: RecordingDrafter, unit: Unit) -> None:
    """Our answer as it is written."""
    console.rule(unit.dataset, style="dim")
    console.print(unit.prompts[0].turns[0], style="dim", end="\n\n", markup=False, soft_wrap=True)
    live = LiveText(console, bench.tokenizer)
    recorder.told = live.told
    _decode(bench, recorder, unit, streamer=live)
    recorder.told = None


def _show_batch(console: Console, bench: Bench, recorder: RecordingDrafter, unit: Unit) -> None:
    """Our answers to questions that are asked together."""
    console.rule(unit.dataset, style="dim")
    made = _decode(bench, recorder, unit)
    for prompt, row in zip(unit.prompts, made.rows, strict=True):
        answer = bench.tokenizer.decode(row, skip_special_tokens=True)
        console.print(prompt.turns[0], style="dim", markup=False)
        console.print(answer, end="\n\n", markup=False, soft_wrap=True)


def _decode(bench: Bench, recorder: RecordingDrafter, unit: Unit, **options: Any) -> Generation:
    inputs = bench.tokenize(unit)
    if inputs is None:
        raise SpeculationError(f"the target's context is too short for the demo's {unit.dataset}; name another target")
    method = Method(OURS, {"assistant_model": recorder}, None, recorder)
    return decode(bench.target, method, inputs, **bench.options(unit) | options)


def table(runs: list[dict[str, Any]]) -> Table:
    """One line per method: its speed-up on each kind of prompt, and over all kinds that every method takes."""
    kinds, names = (list(dict.fromkeys(run[key] for run in runs)) for key in ("dataset", "name"))
    found = {(run["name"], run["dataset"]): run for run in runs}
    shared = [kind for kind in kinds if all((name, kind) in found for name in names)]
    lines = Table(box=None, padding=(0, 1, 0, 0))
    lines.add_column("", no_wrap=True)
    for title in (*kinds, "all", "tokens\n/call", "same\ntext"):
        lines.add_column(title, justify="right", no_wrap=True)
    for name in names:
        ours, plain = ([found[one, kind] for kind in shared] for one in (name, PLAIN))
        mine = [run for run in runs if run["name"] == name]
        lines.add_row(
            name,
            *(f"{found[name, kind]['speedup']:.2f}x" if (name, kind) in found else "refused" for kind in kinds),
            f"{_seconds_per_token(plain) / _seconds_per_token(ours):.2f}x",
            f"{sum(run['mean_acceptance_length'] for run in ours) / len(ours):.2f}",
            "" if name == PLAIN else f"{sum(run['identical'] for run in mine)} of {len(mine)}",
        )
    return lines


def _seconds_per_token(runs: list[dict[str, Any]]) -> float:
    return sum(run["seconds"] / run["tokens"] for run in runs)


def said_of_texts(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Where single answers differ from plain decoding's: near ties in one line, all else in a line each."""
    parted = [(run, difference) for run in runs for difference in run["differences"]]
    if ties := sum(difference["near_tie"] for _, difference in parted):
        yield f"Texts that leave plain decoding's at near ties of two tokens: {ties}. `hf-specdec audit` says where."
    for run, difference in parted:
        if not difference["near_tie"]:
            yield f"WRONG: {run['name']}, {run['dataset']}: differs at new token {difference['position']}"
