"""`hf-specdec train disco`."""

from typer import echo

from ..training import disco


def train_disco(settings: disco.TrainSettings) -> None:
    """Train a classifier, and say how good it is."""
    for line in disco.closing(settings, disco.train_disco(settings)):
        echo(line)
