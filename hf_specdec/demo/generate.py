"""`hf-specdec generate`: continue a text with any models and drafter, beside plain decoding."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

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

    prompt: str
    drafter: str | None = None
    """a folder, Hub repo or `type:key=value,...`; a draft model drafts if there is one, else prompt lookup"""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy"""
    seed: int = 0
    """of sampling"""


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
