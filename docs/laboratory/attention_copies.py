"""What verification forwards take with stock attention, which copies keys and values for each query head, and without.

Run as `python docs/laboratory/attention_copies.py --target smollm2 --pack-linear`. Both take turns over the same cache.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from typer import Option

from hf_specdec.commands.options import command
from hf_specdec.loading.models import PairSettings
from hf_specdec.protocol import Forward
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.ragged import RaggedRunner

REPEATS = 9
WARM_UP = 2
STEP, STOCK, GROUPED = "plain step", "stock", "grouped"


@dataclass(kw_only=True)
class CopySettings(PairSettings):
    """What is timed."""

    rows: Annotated[list[int], Option("--rows", help="Rows.")] = field(default_factory=lambda: [1, 4])
    contexts: Annotated[list[int], Option("--context", help="Tokens before the forward.")] = field(
        default_factory=lambda: [150, 1000]
    )
    widths: Annotated[list[int], Option("--width", help="Tokens per row.")] = field(default_factory=lambda: [2, 5, 16])


@torch.inference_mode()
def milliseconds(model: PreTrainedModel, rows: int, context: int, widths: list[int]) -> dict[tuple[str, int], float]:
    """Medians by kind and width."""
    ids = torch.full((rows, context), 7)
    kwargs = {CACHE: DynamicCache(config=model.config), "attention_mask": torch.ones_like(ids)}
    runner = RaggedRunner(model, kwargs, ids)
    runner.prefill()
    stock = partial(RaggedRunner.run.__wrapped__, runner)  # type: ignore[attr-defined]
    ways: dict[str, Callable[..., Forward]] = {STOCK: stock, GROUPED: partial(RaggedRunner.run, runner)}
    kinds = [(STEP, 1), *((way, width) for width in widths for way in ways)]
    seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for _ in range(REPEATS):
        for way, width in kinds:
            began = time.perf_counter()
            ways.get(way, stock)(ids[:, :width])
            seconds[way, width].append(time.perf_counter() - began)
    return {kind: 1000 * statistics.median(taken[WARM_UP:]) for kind, taken in seconds.items()}


def copied(model: PreTrainedModel, rows: int, columns: int) -> float:
    """Megabytes of keys and values that stock attention writes in a forward of several tokens."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = 2 * config.num_hidden_layers * rows * config.num_attention_heads * columns * size
    return states * model.dtype.itemsize / 1e6


def main(settings: CopySettings) -> None:
    """Every shape, both ways by turns."""
    model = settings.load().target
    table = Table("rows x tokens before", STEP, "width", STOCK, GROUPED, "copied by stock")
    for rows in settings.rows:
        for context in settings.contexts:
            found = milliseconds(model, rows, context, settings.widths)
            for width in settings.widths:
                table.add_row(
                    f"{rows} x {context}",
                    f"{found[STEP, 1]:.1f} ms",
                    str(width),
                    *(f"{found[way, width]:.1f} ms" for way in (STOCK, GROUPED)),
                    f"{copied(model, rows, context + width):.0f} MB",
                )
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
