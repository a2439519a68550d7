"""`hf-specdec explain`: load, take apart, print, and keep what was printed as a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from ...errors import SpeculationError
from ..loading.checks import SEEDS, Range
from ..loading.drafters import DrafterSettings
from ..showing import check_page, page, quiet
from .reading import Explanation, explain
from .showing import print_explanation


@dataclass(kw_only=True)
class ExplainSettings(DrafterSettings):
    """What to explain."""

    prompt: Annotated[str, Option(help="Text to continue.")]
    output: Annotated[
        Path | None, Option("--output", "--html", help="Page (.html) or picture (.svg) of what is printed, to write.")
    ] = None
    max_new_tokens: Annotated[int, Option(help="New tokens, at most."), Range(1)] = 128
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy."), Range(0)] = 0.0
    seed: Annotated[int, Option(help="Seed of sampling."), SEEDS] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range, or a page that cannot be written.
        """
        super().check()
        if not self.prompt.strip():
            raise SpeculationError(f"prompt must hold text to continue, got {self.prompt!r}")
        check_page(self.output)


def run_explain(settings: ExplainSettings) -> Explanation:
    """Generate, print what was found, and write the page that is asked for.

    Raises:
        SpeculationError: bad settings, models that do not work, or a file that cannot be written.
    """
    settings.check()
    with quiet():
        pair = settings.load()
        found = explain(settings, pair, settings.prompt, settings.max_new_tokens, settings.temperature, settings.seed)
    print_explanation(found, Console())
    if settings.output is not None:
        with page(settings.output, f"hf-specdec explain --drafter {settings.spec}") as console:
            print_explanation(found, console)
    return found
