"""What commands share when they show something: pages of what a terminal shows, and silence."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from ..errors import SpeculationError
from .loading.outputs import writable_file

WIDTH = 100
"""letters per line of a page"""


def check_page(path: Path | None) -> None:
    """
    Raises:
        SpeculationError: a file that is neither a page nor a picture, or that cannot be written.
    """
    if path is not None and writable_file(path, "output").suffix not in (".html", ".svg"):
        raise SpeculationError(f"output must be a page (.html) or a picture (.svg), got {str(path)!r}")


@contextmanager
def page(path: Path, title: str) -> Iterator[Console]:
    """A console that nobody sees; what is printed on it inside the block becomes a page or a picture."""
    console = Console(
        record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor", highlight=False
    )
    yield console
    if path.suffix == ".html":
        console.save_html(str(path))
    else:
        console.save_svg(str(path), title=title)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notes of transformers inside the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
