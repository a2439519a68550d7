"""`hf-specdec train eagle`."""

from typer import echo

from ..train import eagle


def train_eagle(settings: eagle.EagleSettings) -> None:
    """Train an EAGLE-3 head, and say how often it would be right.

    Example:

    hf-specdec train eagle --target smollm2 --own-prompts 200 --output my_head
    """
    for line in eagle.closing(settings, eagle.train_eagle(settings)):
        echo(line)
