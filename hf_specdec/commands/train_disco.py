"""`hf-specdec train disco`."""

from typer import echo

from ..train import disco


def train_disco(settings: disco.TrainSettings) -> None:
    r"""Train a classifier, and say how good it is.

    Example:

    hf-specdec train disco --target smollm2 --draft hub_configs/draft_model/draft_model \
      --data chat --data code --output my_disco
    """
    for line in disco.closing(settings, disco.train_disco(settings)):
        echo(line)
