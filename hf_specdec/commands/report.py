"""`hf-specdec report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from ..tools.bench.report import write_report


def report(
    results: Annotated[list[Path], Argument(help="Result files (JSON) of `hf-specdec bench`, one or several.")],
    output: Annotated[Path, Option(help="Folder to write report.md, report.html and the plots to.")] = Path("report"),
) -> None:
    """Write a report, and say which files it is.

    Example:

    hf-specdec report chat.json --output report
    """
    for path in write_report(results, output):
        echo(path)
