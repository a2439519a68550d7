"""`hf-specdec bench`."""

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from ..bench.plan import Settings
from ..bench.run import run_bench


def bench(
    settings: Settings,
    output: Annotated[Path, Option("--output", "--json", help="Result file (JSON) to write.")],
    resume: Annotated[bool, Option("--resume", help="Go on with a result file that was not finished.")] = False,
) -> None:
    """Measure drafters."""
    raise Exit(run_bench(settings, output, resume))
