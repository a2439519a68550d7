"""`hf-specdec generate`: continue a text with any models and drafter, beside plain decoding."""

from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from ..bench.methods import PLAIN, Method
from ..instruments.recording import RecordingDrafter
from ..loading.drafters import default_drafter, load_drafter
from ..loading.models import PairSettings
from ..showing.quiet import quiet
from .colour import legend, painted
from .compare import compare_on_prompt
from .outcomes import differences, table


@dataclass(kw_only=True)
class GenerateSettings(PairSettings):
    """What to continue, and how."""

    prompt: Annotated[str, Option(help="The text to continue.")]
    drafter: Annotated[
        str | None,
        Option(help="Folder, repo or type:key=value,...; draft_model where there is a --draft, else prompt_lookup."),
    ] = None
    max_new_tokens: Annotated[int, Option(help="Tokens to generate, per prompt.")] = 128
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Of sampling.")] = 0


def run_generate(settings: GenerateSettings) -> None:
    """Continue a prompt, and print the text with its history and what speculation gained.

    Raises:
        SpeculationError: a model, a drafter or a combination of them that does not work.
    """
    console, prompt, greedy = Console(highlight=False), settings.prompt, settings.temperature <= 0
    with quiet():
        pair = settings.load()
        spec = settings.drafter or default_drafter(settings.draft)
        recorder = RecordingDrafter(load_drafter(spec, pair.draft))
        methods = [Method(PLAIN), Method(spec, {"assistant_model": recorder}, pair.draft, recorder)]
        options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": not greedy}
        options |= {} if greedy else {"temperature": settings.temperature}
        found, inputs = compare_on_prompt(
            pair.target, pair.tokenizer, methods, prompt, turns=1, seed=settings.seed, **options
        )
        lines = list(differences(pair.target, pair.tokenizer, inputs, found)) if greedy else []
    console.print(legend(console), "\n")
    console.print(painted(console, pair.tokenizer, prompt, found[-1].tokens, recorder.rounds), "\n")
    console.print(table([found], compared=greedy))
    for line in lines:
        console.print(line)
    console.print(f"\n{recorder.last_stats}")
