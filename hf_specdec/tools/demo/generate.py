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
from ..bench.methods import PLAIN, Method
from ..instruments.recording import RecordingDrafter
from ..loading.chat import ask, batch
from ..loading.checks import check_new_tokens, check_seed, check_temperature, check_tokens
from ..loading.drafters import DrafterSettings
from ..loading.models import Pair
from ..showing.quiet import quiet
from .compare import Task, decode, measure
from .live import LiveText, legend
from .outcomes import gain, partings, table
from .talk import talk

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
            SpeculationError: values that nothing can be generated with.
        """
        check_new_tokens(self.max_new_tokens)
        check_temperature(self.temperature)
        check_seed(self.seed)
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
    prompt = str(settings.prompt)
    as_it_is = settings.raw or pair.tokenizer.chat_template is None
    ids = ask(pair.tokenizer, prompt, settings.system, settings.raw)
    inputs = batch([ids], pair.tokenizer.pad_token_id, input_device(pair.target))
    check_tokens(inputs["input_ids"], prompt)
    live = LiveText(console, pair.tokenizer)
    recorder = RecordingDrafter(drafter, live.told)
    ours = Method(settings.spec, {"assistant_model": recorder, "streamer": live}, pair.draft, recorder)
    if live.coloured:
        console.print(legend(), "\n")
    if as_it_is:
        console.print(prompt, end="", style="dim", markup=False, soft_wrap=True)
    found = decode(pair.target, ours, inputs, settings.seed, **options)
    console.print()
    stats = recorder.last_stats
    assert stats is not None
    if not settings.compare:
        console.print(str(stats), markup=False)
        return
    methods = [Method(PLAIN), Method(ours.name, {"assistant_model": drafter}, pair.draft, drafter)]
    with console.status("decoding the same prompt plainly") as status:
        plain = decode(pair.target, methods[0], inputs, settings.seed, **options)
        task = Task(inputs, {outcome.name: outcome for outcome in (plain, found)})
        rounds = measure(pair.target, methods, [task], settings.seed, status.update, **options)
    greedy = not options["do_sample"]
    console.print(f"{rounds} rounds, both methods in turn, {task.shared} new tokens each", markup=False)
    console.print(table({"": task}, compared=greedy))
    for parting in partings(pair.target, pair.tokenizer, inputs, [plain, found]) if greedy else ():
        console.print(parting.text, markup=False)
    for line in [stats.summary(gain(ours.name, [task]), measured=True), *stats.notes]:
        console.print(line, markup=False)
