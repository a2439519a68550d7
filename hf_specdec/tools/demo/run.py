"""`hf-specdec demo`: a real model answers real prompts, plainly, with transformers' own speculation and with ours."""

import copy
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from transformers import PreTrainedModel
from typer import Option

from ...errors import SpeculationWarning
from ...target.devices import input_device
from ...target.packing import packable_dtypes
from ..bench.methods import PLAIN, Method, build_method
from ..instruments.audit import NEXT_STEPS, TOP_TWO_STEPS
from ..instruments.bare import time_bare_forwards
from ..instruments.meter import Forward
from ..instruments.recording import RecordingDrafter
from ..loading.chat import ask, batch
from ..loading.checks import check_new_tokens
from ..loading.drafters import SPEC, load_drafter, own_model
from ..loading.models import Pair, PairSettings
from ..loading.outputs import writable_file
from ..loading.prompts import WARM_UP_TEXT
from ..showing.quiet import quiet
from .compare import Outcome, Task, decode, gains, measure, of_all
from .live import LiveText, legend
from .outcomes import Parting, gain, partings, repeats, summed_up, table
from .picture import Pictured, aside
from .prompts import BATCH, SAMPLES, Sample

READY = Path(__file__).parents[2] / "hub_configs" / "hybrid"
"""the drafter that lies in a clone of the repository"""
WORTHWHILE = 1.2
"""speed-up below which the demo says what stands in the way"""
REPETITIVE = 0.25
"""share of an answer that it repeats of itself, from which on the demo says so"""
UNSTEADY = 1.3
"""times by which one round's speed-up exceeds another's, from which on the demo says so"""
SMALL = 500_000_000
"""parameters of a target at most, to be held in float32, too"""
WIDTH = 6
"""tokens of the verification that is timed then"""
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
    details: Annotated[bool, Option("--details", help="List where texts differ from plain decoding's.")] = False
    output: Annotated[
        str | None, Option("--output", "--svg", help="Save the answers and the table as a picture (SVG).")
    ] = None

    def __post_init__(self) -> None:
        """On a CPU both sides run on packed weights: on plain ones a wide forward costs too much."""
        super().__post_init__()
        self.pack_linear |= self.device == "cpu" and self.dtype in packable_dtypes() and self.quantization is None


def run_demo(settings: DemoSettings) -> None:
    """Decode a few prompts in all ways, show ours as it is written, and print what it gained.

    Raises:
        SpeculationError: a model or drafter that does not load, or a setting that nothing can be shown with.
    """
    check_new_tokens(settings.max_new_tokens)
    if settings.output is not None:
        writable_file(settings.output, "output")
    console = Console(highlight=False) if settings.output is None else Pictured()
    with quiet():
        with console.status("loading the models"):
            pair = settings.load()
            spec = settings.drafter or (str(READY) if READY.is_dir() else "prompt_lookup")
            loading = settings.of_drafts() | {"target": pair.target}
            recorder = RecordingDrafter(load_drafter(spec, pair.draft, **loading))
            beside = [build_method(one, pair.draft, **loading) for one in dict.fromkeys(settings.beside)]
            short = [method.name.rstrip("/").rpartition("/")[2] for method in beside]
            for method, name in zip(beside, short, strict=True):
                if short.count(name) == 1:
                    method.name = name
        console.print(_introduction(settings, pair, recorder), markup=False)
        if LiveText(console, pair.tokenizer).coloured:
            console.print("\n", legend(), sep="")
        stage = Stage(console, pair, _methods(recorder, pair, beside), recorder, settings.max_new_tokens)
        stage.warm_up()
        for sample in SAMPLES:
            stage.show(sample)
        with aside(console):
            stage.show_batch(BATCH)
        console.rule(style="dim")
        rounds = stage.measure()
        with aside(console):
            console.print(stage.said_before(rounds), markup=False)
        console.print(table(stage.tasks))
        with aside(console):
            for line in stage.said_after(settings.details):
                console.print(line, markup=False)
            if gain(OURS, list(stage.tasks.values())) < WORTHWHILE:
                console.print(cost_of_width(pair.target, own_model(recorder.inner)))
            console.print(f"\n{NEXT}", markup=False)
    if settings.output is not None:
        console.save_svg(settings.output, title="hf-specdec demo")


def _methods(recorder: RecordingDrafter, pair: Pair, beside: list[Method]) -> list[Method]:
    """Plain decoding first, ours last; transformers' assisted decoding where there is a draft model."""
    draft = own_model(recorder.inner) or pair.draft
    assisted = [build_method("hf-assisted", draft)] if draft is not None else []
    lookup = build_method("hf-prompt-lookup", None)
    for method, name in zip([*assisted, lookup], [ASSISTED, LOOKUP] if assisted else [LOOKUP], strict=True):
        method.name = name
    return [Method(PLAIN), *assisted, lookup, *beside, Method(OURS, {"assistant_model": recorder}, draft, recorder)]


def _introduction(settings: DemoSettings, pair: Pair, recorder: RecordingDrafter) -> str:
    draft = own_model(recorder.inner)
    drafts = f"{draft.num_parameters() / 1e6:.0f} M parameters" if draft is not None else "no model"
    dtype = str(pair.target.dtype).removeprefix("torch.") + (", packed" if settings.pack_linear else "")
    return (
        f"Target: {settings.target}, {pair.target.num_parameters() / 1e6:.0f} M parameters, "
        f"{dtype}, {torch.get_num_threads()} CPU threads. "
        f"Drafter: {recorder.config.drafter_type}, {drafts}. Greedy, {settings.max_new_tokens} new tokens at most."
    )


class Stage:
    """Where samples are decoded by all methods, ours in view."""

    def __init__(
        self, console: Console, pair: Pair, methods: list[Method], recorder: RecordingDrafter, most: int
    ) -> None:
        self.console, self.pair, self.methods, self.recorder = console, pair, methods, recorder
        self.options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": pair.tokenizer.pad_token_id}
        self.tasks: dict[str, Task] = {}
        self.parted: list[Parting] = []
        """texts that left plain decoding's"""
        self.compared = 0
        """texts held against it"""

    def warm_up(self) -> None:
        """Each method once on text of no importance: no first call of a kernel or of a drafter is measured."""
        with self.console.status("warming up"):
            for method in self.methods:
                self._decode(method, self._inputs([WARM_UP_TEXT]), max_new_tokens=8)

    def show(self, sample: Sample) -> None:
        """Ours as it is written, then the others, unseen."""
        self.console.rule(sample.kind, style="dim")
        self.console.print(sample.text, style="dim", end="\n\n", markup=False, soft_wrap=True)
        inputs = self._inputs([sample.text])
        shown = self._decode(self.methods[-1], inputs, LiveText(self.console, self.pair.tokenizer))
        self._beside(sample.kind, inputs, shown)

    def show_batch(self, questions: tuple[str, ...]) -> None:
        """Questions that are answered together, by the methods that can."""
        kind = f"batch {len(questions)}"
        self.console.rule(kind, style="dim")
        inputs = self._inputs(list(questions))
        with self.console.status(f"{OURS}: {len(questions)} answers together"):
            shown = self._decode(self.methods[-1], inputs)
        for question, row in zip(questions, shown.rows, strict=True):
            answer = self.pair.tokenizer.decode(row, skip_special_tokens=True)
            self.console.print(question, style="dim", markup=False)
            self.console.print(answer, end="\n\n", markup=False, soft_wrap=True)
        self._beside(kind, inputs, shown)

    def _beside(self, kind: str, inputs: dict[str, Any], ours: Outcome) -> None:
        found = []
        for method in self.methods[:-1]:
            with self.console.status(f"{method.name}: the same prompt"):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", SpeculationWarning)  # our hint, beside transformers' refusal
                        found.append(self._decode(method, inputs))
                except ValueError as error:  # transformers speculates on single rows only
                    self.console.print(f"{method.name}: refused. {str(error).splitlines()[0]}", style="dim")
        found.append(ours)
        self.tasks[kind] = Task(inputs, {outcome.name: outcome for outcome in found})
        self.compared += (len(found) - 1) * len(ours.rows)
        with self.console.status("comparing the texts"):
            for parting in partings(self.pair.target, self.pair.tokenizer, inputs, found):
                self.parted.append(Parting(f"{kind}: {parting.text}", parting.near_tie))

    def measure(self) -> int:
        """All methods on all tasks, in rounds; returns how many."""
        self.recorder.told = None
        with self.console.status("measuring") as status:
            told = status.update if status is not None else lambda _: None
            return measure(self.pair.target, self.methods, list(self.tasks.values()), told=told, **self.options)

    def said_before(self, rounds: int) -> str:
        """What the table's figures are."""
        tokens = ", ".join(f"{kind} {task.shared}" for kind, task in self.tasks.items())
        shared = [kind for kind, task in self.tasks.items() if task in of_all(list(self.tasks.values()))]
        return (
            f"Speed-ups over plain decoding are medians of {rounds} rounds. In each round every method writes "
            f"the same number of new tokens ({tokens}). Column all: {', '.join(shared)} together. Column "
            f"rounds: the smallest and the largest speed-up of a round.\nIn {self.dtype} a text can differ from "
            "plain decoding's where two tokens are nearly tied. Two runs can differ likewise, because measured "
            "times decide how much is drafted. Nearly tied means that the logits of plain decoding's two best "
            f"tokens are at most {TOP_TWO_STEPS} steps of {self.dtype} apart ({NEXT_STEPS} for any other "
            "token).\n"
        )

    @property
    def dtype(self) -> str:
        return str(self.pair.target.dtype).removeprefix("torch.")

    def said_after(self, details: bool) -> list[str]:
        """Of the texts: where they part, and those that are less of a feat than they look."""
        lines = summed_up(self.parted, self.compared)
        by_round = gains(OURS, of_all(list(self.tasks.values())))
        if max(by_round) > UNSTEADY * min(by_round):
            lines.append(
                "The rounds differ a lot: something else kept this machine busy. Run it again when the machine is idle."
            )
        lines += [f"  {parting.text}" for parting in self.parted if details and parting.near_tie]
        target = self.pair.target
        if self.dtype != "float32" and target.num_parameters() <= SMALL and not getattr(target, "is_quantized", False):
            lines.append(self.in_float32())
        for kind, task in self.tasks.items():
            if (share := max(map(repeats, task.outcomes[OURS].rows))) > REPETITIVE:
                lines.append(
                    f"{kind}: {share:.0%} of an answer repeats earlier parts of it, which is easier to draft than "
                    "most text."
                )
        return lines

    def in_float32(self) -> str:
        """Where nothing is rounded otherwise in wide forwards, texts are the same."""
        (kind, task), ours = next(iter(self.tasks.items())), self.methods[-1]
        with self.console.status("the same in float32"):
            target = copy.deepcopy(self.pair.target).float()
            found = [decode(target, method, task.inputs, **self.options) for method in (self.methods[0], ours)]
        same, count = found[0].rows == found[1].rows, len(found[0].rows[0])
        return f"In float32: {kind}, {count} tokens, " + (
            "the same text." if same else "NOT the same text. This is a bug, please report it."
        )

    def _decode(self, method: Method, inputs: dict[str, Any], live: LiveText | None = None, **options: Any) -> Outcome:
        self.recorder.told = live.told if live is not None else None
        return decode(self.pair.target, method, inputs, **(self.options | {"streamer": live} | options))

    def _inputs(self, questions: list[str]) -> dict[str, Any]:
        """Token ids padded on the left, and their mask."""
        tokenizer = self.pair.tokenizer
        rows = [ask(tokenizer, question) for question in questions]
        return batch(rows, tokenizer.pad_token_id, input_device(self.pair.target))


def cost_of_width(target: PreTrainedModel, draft: PreTrainedModel | None) -> str:
    """A sentence with the costs that decide what a draft can gain on this machine."""
    ids = torch.full((1, 64), 1, device=input_device(target))
    models: dict[Any, PreTrainedModel] = {"target": target} | ({"draft": draft} if draft is not None else {})
    kinds = [("target", 1), ("target", WIDTH), *([("draft", 1)] if draft is not None else [])]
    forwards = [Forward(role, 1, width, ids.shape[1], 0.0) for role, width in kinds]  # type: ignore[arg-type]
    found = time_bare_forwards(models, forwards, ids)
    costs = [f"{1000 * found[(role, 1, width)]:.0f} ms" for role, width in kinds]  # type: ignore[index]
    drafted = f", a draft step {costs[2]}" if draft is not None else ""
    return (
        f"On this machine a verification of {WIDTH} tokens takes {costs[1]}, a single step of the target {costs[0]}"
        f"{drafted}. Where a forward mostly waits for the weights to come from memory, as on a GPU, a verification "
        "costs little more than a step."
    )
