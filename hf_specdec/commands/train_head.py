"""`hf-specdec train head`."""

from typer import echo

from ..train.heads import TRAININGS, HeadSettings
from ..train.learning import closing, train


def train_head(settings: HeadSettings) -> None:
    """Train a head, and say how often it would be right.

    Example:

    hf-specdec train head --type dflash --target smollm2 --own-prompts 200 --output my_head
    """
    kind = TRAININGS[settings.type]
    for line in closing(kind, settings, train(kind, settings)):
        echo(line)
