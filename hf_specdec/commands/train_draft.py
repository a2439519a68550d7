"""`hf-specdec train draft`."""

from typer import echo

from ..train import draft


def train_draft(settings: draft.DraftSettings) -> None:
    """Train a draft, and say how often it would be right.

    Example:

    hf-specdec train draft --target smollm2 --own-prompts 200 --output my_draft
    """
    for line in draft.closing(settings, draft.train_draft(settings)):
        echo(line)
