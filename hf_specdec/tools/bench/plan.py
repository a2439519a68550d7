"""What a benchmark run measures: its settings, and the units it goes through."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any

from typer import Option

from ...errors import SpeculationError
from ..loading.checks import SEEDS, Range
from ..loading.models import PairSettings
from ..loading.prompts import Prompt, load_prompts
from ..loading.rows import PROMPT_SOURCES, set_name
from .methods import MethodSettings

_decoding: Any = partial(Option, rich_help_panel="Prompts and decoding")


@dataclass(kw_only=True)
class Settings(MethodSettings):
    """What to measure; stored in the result file, and compared by `resume`."""

    prompts: Annotated[list[str], Option(help=f"Prompts: {PROMPT_SOURCES}; may be given several times.")]
    max_new_tokens: Annotated[int, _decoding(help="New tokens per prompt, at most."), Range(1)] = 128
    limit: Annotated[
        int | None, _decoding(help="Take only this many prompts of each source; default: all."), Range(1)
    ] = None
    batch_sizes: Annotated[
        list[int], _decoding("--batch-size", help="Prompts per generate call; may be given several times."), Range(1)
    ] = field(default_factory=lambda: [1])
    temperatures: Annotated[
        list[float],
        _decoding("--temperature", help="Sampling temperature, 0 is greedy; may be given several times."),
        Range(0),
    ] = field(default_factory=lambda: [0.0])
    top_k: Annotated[
        int, _decoding(help="Above temperature 0 sample from so many of the likeliest tokens; 0 for all."), Range(0)
    ] = 0
    repeats: Annotated[
        int, _decoding(help="How often each method decodes each prompt; the median of the times counts."), Range(1)
    ] = 3
    raw: Annotated[bool, _decoding("--raw", help="Continue chats as plain text, without the chat template.")] = False
    system: Annotated[str | None, _decoding(help="System message for chats that have none.")] = None
    seed: Annotated[int, _decoding(help="Seed of sampling and bootstrap intervals."), SEEDS] = 0

    def check(self) -> None:
        """Raise `SpeculationError` for values that cannot be measured."""
        super().check()
        if self.top_k and not max(self.temperatures):
            raise SpeculationError(f"top_k={self.top_k} needs a temperature above 0; add --temperature 1")


def settings_of(shared: PairSettings, **more: Any) -> Settings:
    """Settings that load models as others do, for commands that measure without prompts of their own."""
    return Settings(prompts=[], **{f.name: getattr(shared, f.name) for f in fields(PairSettings)}, **more)


@dataclass
class Unit:
    """A prompt, or a batch of them, and how to decode it; of conversations one turn."""

    dataset: str
    index: int
    batch_size: int
    temperature: float
    prompts: list[Prompt]
    turn: int = 0

    @property
    def key(self) -> tuple[str, int, int, float]:
        return self.dataset, self.index, self.batch_size, self.temperature

    def after(self, answers: Sequence[str]) -> "Unit":
        """The next turn, of those conversations that have one."""
        answered = zip(self.prompts, answers, strict=True)
        going_on = [prompt.after(answer) for prompt, answer in answered if len(prompt.turns) > 1]
        return replace(self, prompts=going_on, turn=self.turn + 1)


def plan(settings: Settings) -> list[Unit]:
    """All units of a run, every prompt file read and checked."""
    files = [(set_name(source), load_prompts(source, settings.limit)) for source in settings.prompts]
    if len({name for name, _ in files}) < len(files):
        raise SpeculationError(
            "prompts must have different names, because the results are listed by name; rename a file, or name the "
            "split of a data set, as ORG/NAME:SPLIT"
        )
    return [
        Unit(name, start // size, size, temperature, prompts[start : start + size])
        for temperature in settings.temperatures
        for size in settings.batch_sizes
        for name, prompts in files
        for start in range(0, len(prompts), size)
    ]
