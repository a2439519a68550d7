"""`hf-specdec demo`: a real model answers real prompts, plainly, with transformers' own speculation and with ours."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from typer import Option

from ...errors import SpeculationWarning
from ...target.devices import input_device
from ...target.packing import packable_dtypes
from ..bench.methods import PLAIN, Generation, Method, build_method, decode
from ..instruments.recording import RecordingDrafter
from ..loading.chat import ask, batch
from ..loading.checks import check_decoding
from ..loading.drafters import SPEC, load_drafter, own_model
from ..loading.models import Pair, PairSettings
from ..loading.outputs import writable_file
from ..loading.prompts import WARM_UP_TEXT
from ..showing import quiet
from .live import LiveText, Pictured, aside, legend
from .prompts import BATCH, SAMPLES
from .timing import ROUNDS, Task, decoded_by_all, differences, measure, table

READY = Path(__file__).parents[2] / "hub_configs" / "hybrid"
"""the drafter in a clone of the repository"""
ASSISTED, LOOKUP, OURS = "hf assisted", "hf lookup", "hf_specdec"
NEXT = """Your own model, with prompt lookup, which needs no draft model:

    import hf_specdec
    model, tokenizer = hf_specdec.load("your/model")
    inputs = tokenizer("Your prompt", return_tensors="pt").to(model.device)
    model.generate(**inputs, max_new_tokens=64, speculation_type="prompt_lookup")
"""


@dataclass(kw_only=True)
class DemoSettings(PairSettings):
    """What to show, and with which models."""

    target: Annotated[str, Option(help="Model to speed up: a folder, a Hub repo, a GGUF file, or smollm2.")] = "smollm2"
    drafter: Annotated[
        str | None,
        Option(help=f"Drafter: {SPEC}. Default: hub_configs/hybrid in a clone of the repository, else prompt_lookup."),
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
        self.pack_linear |= self.device == "cpu" and self.dtype in packable_dtypes() and self.quantization is None


def run_demo(settings: DemoSettings) -> None:
    """Decode a few prompts by all methods, show ours as it is written, and print what it gained.

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
            methods = _methods(settings, pair)
        stage = Stage(console, pair, methods, settings.max_new_tokens)
        console.print(_introduction(settings, pair, methods[-1]), markup=False)
        if LiveText(console, pair.tokenizer).coloured:
            console.print("\n", legend(), sep="")
        tasks = {kind: stage.show(kind, question) for kind, question in SAMPLES.items()}
        with aside(console):
            tasks[f"batch {len(BATCH)}"] = stage.show_batch(list(BATCH))
        console.rule(style="dim")
        stage.measure(list(tasks.values()))
        with aside(console):
            console.print(_said_of_figures(tasks, stage.dtype), markup=False)
        console.print(table(tasks))
        with aside(console):
            for line in stage.said_of_texts(tasks):
                console.print(line, markup=False)
            console.print(f"\n{NEXT}", markup=False)
    if settings.output is not None:
        console.save_svg(settings.output, title="hf-specdec demo")


def _methods(settings: DemoSettings, pair: Pair) -> list[Method]:
    """Plain decoding first, ours last; transformers' assisted decoding where there is a draft model."""
    spec = settings.drafter or (str(READY) if READY.is_dir() else "prompt_lookup")
    loading = settings.of_drafts() | {"target": pair.target}
    drafter = load_drafter(spec, pair.draft, **loading)
    draft = own_model(drafter) or pair.draft
    assisted = [] if draft is None else [_named(ASSISTED, build_method("hf-assisted", draft))]
    lookup = _named(LOOKUP, build_method("hf-prompt-lookup", None))
    beside = [build_method(one, pair.draft, **loading) for one in dict.fromkeys(settings.beside)]
    short = [method.name.rstrip("/").rpartition("/")[2] for method in beside]
    beside = [_named(n if short.count(n) == 1 else m.name, m) for n, m in zip(short, beside, strict=True)]
    recorder = RecordingDrafter(drafter)
    return [Method(PLAIN), *assisted, lookup, *beside, Method(OURS, {"assistant_model": recorder}, draft, recorder)]


def _named(name: str, method: Method) -> Method:
    method.name = name
    return method


def _introduction(settings: DemoSettings, pair: Pair, ours: Method) -> str:
    assert ours.drafter is not None
    drafts = f"{ours.draft.num_parameters() / 1e6:.0f} M parameters" if ours.draft is not None else "no model"
    dtype = str(pair.target.dtype).removeprefix("torch.") + (", packed" if settings.pack_linear else "")
    return (
        f"Target: {settings.target}, {pair.target.num_parameters() / 1e6:.0f} M parameters, "
        f"{dtype}, {torch.get_num_threads()} CPU threads. "
        f"Drafter: {ours.drafter.config.drafter_type}, {drafts}. Greedy, {settings.max_new_tokens} new tokens at most."
    )


class Stage:
    """Where prompts are decoded by all methods, ours in view."""

    def __init__(self, console: Console, pair: Pair, methods: list[Method], max_new_tokens: int) -> None:
        self.console, self.pair = console, pair
        *self.others, self.ours = methods
        self.options = {
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "pad_token_id": pair.tokenizer.pad_token_id,
        }
        with console.status("warming up"):  # no first call of a kernel or of a drafter is measured
            for method in methods:
                self._decode(method, self._inputs([WARM_UP_TEXT]), max_new_tokens=8)

    @property
    def dtype(self) -> str:
        return str(self.pair.target.dtype).removeprefix("torch.")

    def show(self, kind: str, question: str) -> Task:
        """Ours as it is written, then the other methods, unseen."""
        self.console.rule(kind, style="dim")
        self.console.print(question, style="dim", end="\n\n", markup=False, soft_wrap=True)
        inputs, live = self._inputs([question]), LiveText(self.console, self.pair.tokenizer)
        self.recorder.told = live.told
        shown = self._decode(self.ours, inputs, streamer=live)
        self.recorder.told = None
        return self._beside(inputs, shown)

    def show_batch(self, questions: list[str]) -> Task:
        """Questions that are answered together, by the methods that can."""
        self.console.rule(f"batch {len(questions)}", style="dim")
        inputs = self._inputs(questions)
        with self.console.status(f"{OURS}: {len(questions)} answers together"):
            shown = self._decode(self.ours, inputs)
        for question, row in zip(questions, shown.rows, strict=True):
            answer = self.pair.tokenizer.decode(row, skip_special_tokens=True)
            self.console.print(question, style="dim", markup=False)
            self.console.print(answer, end="\n\n", markup=False, soft_wrap=True)
        return self._beside(inputs, shown)

    def measure(self, tasks: list[Task]) -> None:
        """All methods on all tasks, in rounds."""
        with self.console.status("measuring") as status:
            told = status.update if status is not None else lambda _: None
            measure(self.pair.target, [*self.others, self.ours], tasks, told=told, **self.options)

    def said_of_texts(self, tasks: dict[str, Task]) -> list[str]:
        """How many texts leave plain decoding's at near ties, and each that leaves it elsewhere."""
        with self.console.status("comparing the texts"):
            tokenizer = self.pair.tokenizer
            found = [
                (f"{kind}: {whose} {difference.said(tokenizer)}", difference.near_tie)
                for kind, task in tasks.items()
                for whose, difference in differences(self.pair.target, tokenizer, task)
            ]
        texts, ties = sum((len(task.made) - 1) * task.rows for task in tasks.values()), sum(tie for _, tie in found)
        summed = [f"{ties} of {texts} texts differ from plain decoding's at near ties."] if ties else []
        return summed + [f"WRONG: {said}" for said, tie in found if not tie]

    @property
    def recorder(self) -> RecordingDrafter:
        assert isinstance(self.ours.drafter, RecordingDrafter)
        return self.ours.drafter

    def _beside(self, inputs: dict[str, Any], ours: Generation) -> Task:
        made = []
        for method in self.others:
            with self.console.status(f"{method.name}: the same prompt"):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", SpeculationWarning)  # our hint, beside transformers' refusal
                        made.append(self._decode(method, inputs))
                except ValueError as error:  # transformers speculates on single rows only
                    self.console.print(f"{method.name}: refused. {str(error).splitlines()[0]}", style="dim")
        return Task(inputs, {one.method.name: one for one in [*made, ours]})

    def _decode(self, method: Method, inputs: dict[str, Any], **options: Any) -> Generation:
        return decode(self.pair.target, method, inputs, **self.options | options)

    def _inputs(self, questions: list[str]) -> dict[str, Any]:
        """Token ids padded on the left, and their mask."""
        tokenizer = self.pair.tokenizer
        rows = [ask(tokenizer, question) for question in questions]
        return batch(rows, tokenizer.pad_token_id, input_device(self.pair.target))


def _said_of_figures(tasks: dict[str, Task], dtype: str) -> str:
    """What the table's figures are."""
    tokens = ", ".join(f"{kind} {task.shared}" for kind, task in tasks.items())
    by_all = decoded_by_all(list(tasks.values()))
    shared = ", ".join(kind for kind, task in tasks.items() if task in by_all)
    return (
        f"Speed-ups over plain decoding are medians of {ROUNDS} rounds. In each round every method writes the same "
        f"number of new tokens ({tokens}). Column all: {shared} together. Column rounds: the smallest and the largest "
        f"speed-up of a round.\nIn {dtype} a text can differ from plain decoding's where two tokens are nearly tied. "
        "Two runs can differ likewise, because measured times decide how much is drafted.\n"
    )
