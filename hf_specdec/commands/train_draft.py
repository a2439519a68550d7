"""`hf-specdec train draft`."""

from typer import echo

from ..training import draft
from ..training.draft.run import closing


def train_draft(settings: draft.DraftSettings) -> None:
    """Train a draft, and say how often it would be right."""
    for line in closing(settings, draft.train_draft(settings)):
        echo(line)
