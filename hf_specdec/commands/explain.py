"""`hf-specdec explain`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from ..explain.explanation import ExplainSettings
from ..explain.run import run_explain


def explain(
    settings: ExplainSettings,
    html: Annotated[Path | None, Option(help="Page to write, beside the picture in the terminal.")] = None,
) -> None:
    """Take a generation apart."""
    run_explain(settings, html)
