"""`hf-specdec bench`."""

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from ..tools.bench.plan import Settings
from ..tools.bench.run import run_bench


def bench(
    settings: Settings,
    output: Annotated[
        Path, Option("--output", "--json", help="Result file (JSON) to write; `hf-specdec report` reads it.")
    ],
    write: Annotated[Path | None, Option(help="New folder for the best drafter, if one beats plain decoding.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the result file of an interrupted run.")] = False,
) -> None:
    r"""Measure drafters.

    Example:

    hf-specdec bench --target smollm2 --drafter hub_configs/hybrid --drafter prompt_lookup \
      --prompts chat --limit 4 --pack-linear --output chat.json
    """
    raise Exit(run_bench(settings, output, resume, write))
