"""How many upper layers should streams run through? Speculative Streaming's Figure 6, and what it leaves out.

    python docs/laboratory/streaming_layers.py --target smollm2 --pack-linear --prompts TEST --folder N2 --folder N4 \\
        --picture layers.png

Each FOLDER holds streams that were trained alike but for `--num-layers`. Where they tuned their target the metric is of
the tuned one, as in the figure; tokens per call, speed-up over plain decoding of the same target and how often the
first stream was right on texts not seen are shown beside it.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from typer import Option

from hf_specdec import StreamingDrafter
from hf_specdec.commands.options import command
from streaming_table import TableSettings, answers_to, measured


@dataclass(kw_only=True)
class LayersSettings(TableSettings):
    """What is compared."""

    folder: Annotated[list[str], Option(help="Folders of trained streams.")] = field(default_factory=list)
    picture: Annotated[str | None, Option(help="Picture to save.")] = None


def main(settings: LayersSettings) -> None:
    """Decode, print, and draw."""
    answers = answers_to(settings.prompts)
    table = Table("N_s", "metric", "first stream right", "tokens per call", "speed-up", "extra parameters")
    found = []
    for folder in settings.folder:
        config = StreamingDrafter.from_pretrained(folder).config
        tuned = folder if config.mode == "tuned" else None
        rows = measured(replace(settings, drafter=[]), f"N_s = {config.num_layers}", tuned, folder, answers)
        (_, _, metric), (alone, speed, _) = rows[:2]
        right = json.loads((Path(folder) / "training.json").read_text())["first"]
        found.append((config.num_layers, metric or (), right, alone.per_call, speed))
        scores = " / ".join(f"{value:.3f}" for value in metric or ())
        figures = (scores, f"{right:.2f}", f"{alone.per_call:.2f}", f"{speed:.2f}", f"{alone.parameters:,}")
        table.add_row(str(config.num_layers), *figures)
    Console(width=140).print(table)
    if settings.picture is not None:
        draw(found, settings.picture)


def draw(found: list[tuple[int, tuple[float, ...], float, float, float]], picture: str) -> None:
    """Metric, tokens per call and speed-up by N_s."""
    layers = [n for n, *_ in found]
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, name in enumerate(("Rouge-1", "Rouge-Lsum") if len(found[0][1]) == 2 else ("metric",)):
        left.plot(layers, [metric[i] for _, metric, *_ in found], marker="o", label=name)
    right.plot(layers, [per_call for *_, per_call, _ in found], marker="o", label="tokens per call")
    right.plot(layers, [speed for *_, speed in found], marker="o", label="speed-up")
    for panel in (left, right):
        panel.set_xlabel("N_s, upper layers with streams")
        panel.set_xticks(layers)
        panel.legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    command(main, None, __doc__)()
