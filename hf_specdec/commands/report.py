"""`hf-specdec report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from ..bench.report import write_report


def report(
    results: Annotated[list[Path], Argument(help="Result files of `hf-specdec bench`.")],
    output: Annotated[Path, Option(help="Folder for report.md, report.html and the plots.")] = Path("report"),
) -> None:
    """Write a report, and say which files it is."""
    for path in write_report(results, output):
        echo(path)
