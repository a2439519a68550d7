"""`hf-specdec train streaming`."""

from typer import echo

from ..train.learning import closing, train
from ..train.streaming import StreamingSettings, StreamingTraining


def train_streaming(settings: StreamingSettings) -> None:
    """Train streams, and say how often they would be right.

    Example:

    hf-specdec train streaming --target smollm2 --own-prompts 200 --output my_streams
    """
    for line in closing(StreamingTraining, settings, train(StreamingTraining, settings)):
        echo(line)
