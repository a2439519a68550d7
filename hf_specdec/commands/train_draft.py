"""`hf-specdec train draft`."""

from typer import echo

from ..train.draft import DraftSettings, DraftTraining
from ..train.learning import closing, train


def train_draft(settings: DraftSettings) -> None:
    """Train a draft, and say how often it would be right.

    Example:

    hf-specdec train draft --target smollm2 --own-prompts 200 --output my_draft
    """
    for line in closing(DraftTraining, settings, train(DraftTraining, settings)):
        echo(line)
