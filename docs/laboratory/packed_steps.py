"""Time of a forward by its width, with plain weights and with packed ones.

Run as `python docs/laboratory/packed_steps.py --target smollm2 --draft hub_configs/draft_model/draft_model`. A round of
speculation is a few steps of the draft and one wide forward of the target, so these are the times that decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from typer import Option

from hf_specdec import pack_linear, unpack_linear
from hf_specdec.commands.options import command
from hf_specdec.tools.instruments.bare import time_bare_forwards
from hf_specdec.tools.instruments.meter import Forward
from hf_specdec.tools.loading.models import PairSettings

CONTEXT = 128
"""tokens before the forward"""


@dataclass(kw_only=True)
class StepSettings(PairSettings):
    """What is timed."""

    widths: Annotated[list[int], Option("--width", help="Tokens per row.")] = field(
        default_factory=lambda: [1, 2, 4, 6, 8, 12, 16, 24]
    )
    rows: Annotated[int, Option(help="Rows.")] = 1


@torch.no_grad()
def milliseconds(model: PreTrainedModel, rows: int, widths: Sequence[int]) -> list[float]:
    """Medians, one by width."""
    ids = torch.full((rows, CONTEXT), 7)
    forwards = [Forward("target", rows, width, CONTEXT, 0.0) for width in widths]
    table = time_bare_forwards({"target": model}, forwards, ids)
    return [1000 * table["target", rows, width] for width in widths]


def main(settings: StepSettings) -> None:
    """Both models, plain and packed by turns."""
    pair = settings.load()
    table = Table(
        "model", "weights", *(f"{settings.rows} x {width}" for width in settings.widths), title="milliseconds"
    )
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        if model is None:
            continue
        for kind in ("plain", "packed"):
            if kind == "packed":
                pack_linear(model)
            found = milliseconds(model, settings.rows, settings.widths)
            table.add_row(name, kind, *(f"{value:.1f}" for value in found))
        unpack_linear(model)
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
