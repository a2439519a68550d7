"""`hf-specdec generate`: answer a question or continue a text with any models and drafter, as it is written."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from rich.console import Console
from typer import Option

from ...drafters import Drafter
from ...errors import SpeculationError
from ...target.devices import input_device
from ..bench.decoding import decode
from ..bench.measure import Bench
from ..bench.methods import PLAIN, Method
from ..bench.plan import Unit, settings_of
from ..bench.results import Results
from ..bench.run import summary_tables
from ..instruments.recording import RecordingDrafter
from ..loading.chat import ask, batch
from ..loading.checks import check_decoding, check_tokens
from ..loading.drafters import DrafterSettings
from ..loading.models import Pair
from ..loading.prompts import Prompt
from ..showing import quiet
from .live import LiveText, legend
from .talk import talk

REPEATS = 3
"""how often each method decodes the prompt for `--compare`"""

_decoding: Any = partial(Option, rich_help_panel="Decoding")


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
    max_new_tokens: Annotated[int, _decoding(help="New tokens per answer, at most.")] = 256
    temperature: Annotated[float, _decoding(help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int, _decoding(help="Seed of sampling.")] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: a value out of range, or options that exclude each other.
        """
        check_decoding(self.max_new_tokens, self.temperature, self.seed)
        if not self.chat and not (self.prompt or "").strip():
            raise SpeculationError(
                f"prompt must hold some text, got {self.prompt!r}; give one, or talk to the model with --chat"
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


def run_generate(settings: GenerateSettings) -> None:
    """Write a text, or talk, and say what speculation gained.

    Raises:
        SpeculationError: a setting, a model, a drafter or a combination of them that does not work.
    """
    settings.check()
    console = Console(highlight=False)
    with quiet():
        pair = settings.load()
        drafter = settings.load_drafter(pair)
        options = settings.options() | {"pad_token_id": pair.tokenizer.pad_token_id}
        if settings.chat:
            torch.manual_seed(settings.seed)
            talk(console, pair, drafter, settings.system, settings.prompt, options)
        else:
            _answer(console, pair, drafter, settings, options)


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
    runs = _compared(pair, drafter, settings)
    for table in summary_tables(runs):
        console.print(table)
    for line in [stats.summary(runs[-1]["speedup"], measured=True), *stats.notes]:
        console.print(line, markup=False)


def _compared(pair: Pair, drafter: Drafter, settings: GenerateSettings) -> list[dict[str, Any]]:
    """The figures of plain decoding and of the drafter, which take turns at the prompt."""
    keys = ("max_new_tokens", "raw", "system", "seed")
    chosen = settings_of(settings, repeats=REPEATS, **{key: getattr(settings, key) for key in keys})
    methods = [Method(PLAIN), Method(settings.spec, {"assistant_model": drafter}, pair.draft, drafter)]
    bench, results = Bench(chosen, pair, [methods] * REPEATS), Results({})
    bench.run(results, [Unit("prompt", 0, 1, settings.temperature, [Prompt((str(settings.prompt),), chat=True)])])
    return results.runs
