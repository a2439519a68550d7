"""`Pictured`: a console of which a part becomes a picture."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.text import Text


class Pictured(Console):
    """What is printed on it goes into the picture, but for what is printed `aside`. Lines are broken at its width, so a
    text that is written piece by piece appears once it ends."""

    def __init__(self) -> None:
        super().__init__(highlight=False, record=True, width=100, force_terminal=True, color_system="truecolor")
        self._begun = Text()
        """a line that goes on"""

    def status(self, *_: Any, **__: Any) -> Any:
        """Nothing turns in a picture."""
        return nullcontext()

    def print(self, *objects: Any, **options: Any) -> None:
        """A text that is written piece by piece is laid out once its last line ends."""
        if options.get("end") == "" and all(isinstance(piece, Text) for piece in objects):
            self._begun.append_text(Text().join(objects))
            return
        begun, self._begun = self._begun, Text()
        if begun:
            super().print(begun, soft_wrap=False)
        if objects or not begun:
            super().print(*objects, **options | {"soft_wrap": False})


@contextmanager
def aside(console: Console) -> Iterator[None]:
    """What is printed meanwhile is for who sits there, and left out of a picture."""
    record, console.record = console.record, False
    try:
        yield
    finally:
        console.record = record
