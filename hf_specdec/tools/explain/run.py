"""`hf-specdec explain`: load, take apart, print, and keep what was printed as a page."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from ...errors import SpeculationError
from ..loading.checks import SEEDS, Range
from ..loading.drafters import DrafterSettings
from ..loading.outputs import writable_file
from ..showing import quiet
from .reading import Explanation, explain
from .showing import print_explanation

WIDTH = 110
"""letters per line of a page"""


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
        if self.output is not None:
            if self.output.suffix not in (".html", ".svg"):
                raise SpeculationError(f"output must be a page (.html) or a picture (.svg), got {str(self.output)!r}")
            writable_file(self.output, "output")


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
        page = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
        print_explanation(found, page)
        if settings.output.suffix == ".html":
            page.save_html(str(settings.output))
        else:
            page.save_svg(str(settings.output), title=f"hf-specdec explain --drafter {settings.spec}")
    return found
