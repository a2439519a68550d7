"""Coloured text that can be read without colour, too: where there is none, signs stand around it."""

from rich.console import Console
from rich.text import Text


def marked(console: Console, text: str, style: str, signs: tuple[str, str]) -> Text:
    """The text in its style, or between its signs on a console without colours (no terminal, or NO_COLOR is set)."""
    if text and (console.color_system is None or console.no_color):
        return Text(f"{signs[0]}{text}{signs[1]}")
    return Text(text, style=style)
