"""`hf-specdec demo`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from ..demo import run_demo


def demo(svg: Annotated[Path | None, Option(help="Picture to save of what is printed.")] = None) -> None:
    """Decode a few prompts."""
    run_demo(svg=svg)
