"""What a benchmark run measures: its settings, and the units it goes through."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import SpeculationError
from ..loading.checks import check_new_tokens, check_seed, check_temperature
from ..loading.models import PairSettings
from ..loading.prompts import Prompt, load_prompts


@dataclass(kw_only=True)
class Settings(PairSettings):
    """What to measure; stored in the result file, and compared by `resume`."""

    prompts: Annotated[list[str], Option(help="JSON lines of a task or of chats, or text with a prompt per line.")]
    drafters: Annotated[
        list[str] | None,
        Option("--drafter", help="Folder, repo or type:key=value,... such as draft_model:num_draft_tokens=5."),
    ] = None
    baselines: Annotated[
        list[str] | None,
        Option(
            "--baseline",
            help="plain (always there), hf-assisted, hf-confidence, hf-prompt-lookup; all where not given.",
        ),
    ] = None
    max_new_tokens: Annotated[int, Option(help="Tokens to generate, per prompt.")] = 128
    limit: Annotated[int | None, Option(help="Prompts to take of each file.")] = None
    batch_sizes: Annotated[
        list[int], Option("--batch-size", help="Prompts per generate call; may be given several times.")
    ] = field(default_factory=lambda: [1])
    temperatures: Annotated[list[float], Option("--temperature", help="0 is greedy; may be given several times.")] = (
        field(default_factory=lambda: [0.0])
    )
    repeats: Annotated[int, Option(help="Times each prompt is decoded by each method; medians count.")] = 3
    pace_target: Annotated[float | None, Option(help="Milliseconds that each forward of the target takes.")] = None
    pace_draft: Annotated[float | None, Option(help="Milliseconds that each forward of the draft takes.")] = None
    synthetic_acceptance: Annotated[
        float | None, Option(help="Share of draft tokens to get right, whatever the draft has learned.")
    ] = None
    raw: Annotated[bool, Option("--raw", help="Ask chats as texts, without the chat template.")] = False
    system: Annotated[str | None, Option(help="System message of chats that have none of their own.")] = None
    seed: Annotated[int, Option(help="Of sampling, of synthetic acceptance and of the bootstrap.")] = 0

    def check(self) -> None:
        """Raise `SpeculationError` for values that cannot be measured."""
        check_new_tokens(self.max_new_tokens)
        if self.repeats < 1:
            raise SpeculationError(f"repeats must be 1 or more, got {self.repeats}")
        if min(self.batch_sizes) < 1:
            raise SpeculationError(f"batch_size must be 1 or more, got {min(self.batch_sizes)}")
        for temperature in self.temperatures:
            check_temperature(temperature)
        check_seed(self.seed)
        if self.draft is None and (self.pad_draft_mlp or self.pace_draft):
            raise SpeculationError("pad_draft_mlp and pace_draft need a draft model; name one with --draft")
        if self.synthetic_acceptance is not None and (
            self.draft is None or max(self.temperatures) > 0 or max(self.batch_sizes) > 1
        ):
            raise SpeculationError("synthetic_acceptance needs --draft, temperature 0 and batch size 1")


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
    files = [(Path(path).stem, load_prompts(path, settings.limit)) for path in settings.prompts]
    if len({name for name, _ in files}) < len(files):
        raise SpeculationError("prompt files must have different names, which name the data sets of the results")
    return [
        Unit(name, start // size, size, temperature, prompts[start : start + size])
        for temperature in settings.temperatures
        for size in settings.batch_sizes
        for name, prompts in files
        for start in range(0, len(prompts), size)
    ]
