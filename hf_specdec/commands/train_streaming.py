"""`hf-specdec train streaming`."""

from typer import echo

from ..train import streaming


def train_streaming(settings: streaming.StreamingSettings) -> None:
    """Train streams, and say how often they would be right.

    Example:

    hf-specdec train streaming --target smollm2 --own-prompts 200 --output my_streams
    """
    for line in streaming.closing(settings, streaming.train_streaming(settings)):
        echo(line)
