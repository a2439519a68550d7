"""`hf-specdec generate`: answer a question or continue a text with any models and drafter, as it is written.

`many` answers a file of prompts.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from typer import Option

from ...drafters import Drafter
from ...errors import SpeculationError
from ...protocol import DraftContext
from ...session import DraftSession
from ...stats import SpeculationStats
from ...target.devices import input_device
from ..answers import AnswerFile
from ..bench.decoding import decode
from ..bench.measure import Bench
from ..bench.method import Method
from ..bench.methods import PLAIN
from ..bench.plan import Unit, settings_of
from ..bench.results import Results
from ..bench.run import summary_tables
from ..bench.summary import median_repeats
from ..instruments.recording import Listening, RecordingDrafter
from ..loading.chat import ask, batch
from ..loading.checks import SEEDS, Range, check_tokens
from ..loading.drafters import DrafterSettings
from ..loading.models import Pair
from ..loading.prompts import Prompt, all_prompts
from ..loading.rows import PROMPT_SOURCES
from ..showing import quiet
from .live import LiveText, legend
from .many import Answering, answer_all
from .talk import talk
from .turns import forget

REPEATS = 3
"""how often each method decodes the prompt for `--compare`"""
SETTLED = (
    *("target", "revision", "gguf_file", "quantization", "dtype"),
    *("raw", "system", "max_new_tokens", "temperature", "seed"),
)
"""what the answers to `--prompts` depend on beside them; drafters change no text"""

_decoding: Any = partial(Option, rich_help_panel="Decoding")
_many: Any = partial(Option, rich_help_panel="Many prompts")


@dataclass(kw_only=True)
class GenerateSettings(DrafterSettings):
    """What to continue, and how."""

    prompt: Annotated[
        str | None, Option(help="Question to answer; a model without a chat template continues it as a text.")
    ] = None
    chat: Annotated[bool, Option("--chat", help="Talk turn by turn; --prompt, if given, is the first turn.")] = False
    system: Annotated[str | None, Option(help="System message of the chat.")] = None
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False
    compare: Annotated[
        bool, Option("--compare", help="Also decode plainly: print the measured speed-up and where texts differ.")
    ] = False
    prompts: Annotated[str | None, _many(help=f"Answer each prompt of {PROMPT_SOURCES}.")] = None
    output: Annotated[
        Path | None, _many("--output", help="File for the answers, a line of JSON each; a rerun goes on with it.")
    ] = None
    limit: Annotated[int | None, _many(help="Prompts to answer, at most."), Range(1)] = None
    max_rows: Annotated[int, _many(help="Prompts to decode together, at most."), Range(1)] = 16
    max_new_tokens: Annotated[int, _decoding(help="New tokens per answer, at most."), Range(1)] = 256
    temperature: Annotated[float, _decoding(help="Sampling temperature; 0 is greedy."), Range(0)] = 0.0
    seed: Annotated[int, _decoding(help="Seed of sampling."), SEEDS] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: a value out of range, or options that exclude each other.
        """
        super().check()
        if (self.prompts is None) != (self.output is None):
            raise SpeculationError("prompts (a file) and output (a file for the answers) go together; give both")
        for name in ("prompt", "chat", "compare"):
            if self.prompts is not None and getattr(self, name):
                raise SpeculationError(f"{name} does not go with prompts, a file of them; leave one of them out")
        if self.prompts is None and not self.chat and not (self.prompt or "").strip():
            raise SpeculationError(
                f"prompt must hold some text, got {self.prompt!r}; give one, a file of them with --prompts, or talk to "
                "the model with --chat"
            )
        for name in ("raw", "compare"):
            if self.chat and getattr(self, name):
                raise SpeculationError(f"{name} works with a single prompt, not with chat; leave one of them out")
        if self.raw and self.system:
            raise SpeculationError("system needs the chat template, which raw switches off; leave one of them out")

    def options(self) -> dict[str, Any]:
        """Of `generate`."""
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        return {"max_new_tokens": self.max_new_tokens} | sampling


def run_generate(settings: GenerateSettings) -> int:
    """Write a text, or talk, or answer a file of prompts, and say what speculation gained; returns the exit status.

    Raises:
        SpeculationError: a setting, a model, a drafter or a combination of them that does not work.
    """
    settings.check()
    console = Console(highlight=False)
    if settings.prompts is not None:
        return _answer_all(console, settings)
    with quiet():
        pair = settings.load()
        drafter = settings.load_drafter(pair)
        options = settings.options() | {"pad_token_id": pair.tokenizer.pad_token_id}
        if settings.chat:
            torch.manual_seed(settings.seed)
            talk(console, pair, drafter, settings.system, settings.prompt, options)
        else:
            _answer(console, pair, drafter, settings, options)
    return 0


def _answer_all(console: Console, settings: GenerateSettings) -> int:
    """The answers to all prompts, in a file. Models, which take long to load, come after what may be wrong with it."""
    prompts = all_prompts(str(settings.prompts), settings.limit)
    told = {name: getattr(settings, name) for name in SETTLED}
    file = AnswerFile(str(settings.output), [prompt.said for prompt in prompts], told)
    if not file.missing:
        file.finish()
        console.print(f"{settings.output} holds the answers to all {len(prompts)} prompts already", markup=False)
        return 0
    with quiet():
        pair = settings.load()
        options = settings.options() | {"pad_token_id": pair.tokenizer.pad_token_id}
        answering = Answering(pair, settings.load_drafter(pair), options, settings.raw, settings.system)
        return answer_all(console, file, prompts, answering, settings.max_rows)


def _answer(
    console: Console, pair: Pair, drafter: Drafter, settings: GenerateSettings, options: dict[str, Any]
) -> None:
    """One answer as it is written, what speculation gained, and the comparison with plain decoding if asked for."""
    prompt = str(settings.prompt)
    ids = ask(pair.tokenizer, prompt, settings.system, settings.raw)
    inputs = batch([ids], pair.tokenizer.pad_token_id, input_device(pair.target))
    check_tokens(inputs["input_ids"], prompt)
    live = LiveText(console, pair.tokenizer)
    recorder = RecordingDrafter(drafter, live.told)
    if live.coloured:
        console.print(legend(), "\n")
    if settings.raw or pair.tokenizer.chat_template is None:
        console.print(prompt, end="", style="dim", markup=False, soft_wrap=True)
    shown = Method(settings.spec, {"assistant_model": recorder, "streamer": live}, pair.draft, recorder)
    decode(pair.target, shown, inputs, settings.seed, **options)
    console.print()
    stats = recorder.last_stats
    assert stats is not None
    if not settings.compare:
        console.print(str(stats), markup=False)
        return
    runs, stats = _compared(pair, drafter, settings)
    for table in summary_tables(runs):
        console.print(table)
    for line in [stats.summary(runs[-1]["speedup"], measured=True), *stats.notes]:
        console.print(line, markup=False)


def _compared(
    pair: Pair, drafter: Drafter, settings: GenerateSettings
) -> tuple[list[dict[str, Any]], SpeculationStats]:
    """The figures of plain decoding and of the drafter, which take turns at the prompt, and the drafter's statistics of
    the repetition that the figures are of."""
    keys = ("max_new_tokens", "raw", "system", "seed")
    chosen = settings_of(settings, repeats=REPEATS, **{key: getattr(settings, key) for key in keys})
    ours = _Forgetful(drafter)
    methods = [Method(PLAIN), Method(settings.spec, {"assistant_model": ours}, pair.draft, ours)]
    bench, results = Bench(chosen, pair, [methods] * REPEATS), Results({})
    bench.run(results, [Unit("prompt", 0, 1, settings.temperature, [Prompt((str(settings.prompt),), chat=True)])])
    (counted,) = median_repeats(m for m in results.measurements if m.method == settings.spec)
    return results.runs, counted.stats


class _Forgetful(Listening):
    """Meets the prompt for the first time in every repetition: else it would copy its own answer."""

    def start(self, context: DraftContext) -> DraftSession:
        forget(self.inner)
        return self.inner.start(context)
