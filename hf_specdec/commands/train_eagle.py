"""`hf-specdec train eagle`."""

from typer import echo

from ..train.eagle import EagleSettings, EagleTraining
from ..train.learning import closing, train


def train_eagle(settings: EagleSettings) -> None:
    """Train an EAGLE-3 head, and say how often it would be right.

    Example:

    hf-specdec train eagle --target smollm2 --own-prompts 200 --output my_head
    """
    for line in closing(EagleTraining, settings, train(EagleTraining, settings)):
        echo(line)
