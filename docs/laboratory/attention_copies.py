"""What forwards take with stock attention, which copies keys and values for each query head, and with heads grouped.

Run as `python docs/laboratory/attention_copies.py --target smollm2 --pack-linear`. Both take turns over the same cache.
"""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from typer import Option

from hf_specdec.commands.options import command
from hf_specdec.target import ragged
from hf_specdec.target.inputs import CACHE
from hf_specdec.tools.loading.models import PairSettings

REPEATS = 9
WARM_UP = 2


@dataclass(kw_only=True)
class CopySettings(PairSettings):
    """What is timed."""

    rows: Annotated[list[int], Option("--rows", help="Rows.")] = field(default_factory=lambda: [1, 4])
    contexts: Annotated[list[int], Option("--context", help="Tokens before the forward.")] = field(
        default_factory=lambda: [150, 1000]
    )
    widths: Annotated[list[int], Option("--width", help="Tokens per row.")] = field(
        default_factory=lambda: [1, 2, 5, 16]
    )


def stock_attention(ends: Any) -> nullcontext[None]:
    """In the place of `grouped_attention`."""
    return nullcontext()


WAYS = {"stock": stock_attention, "grouped": ragged.grouped_attention}


@torch.inference_mode()
def milliseconds(model: PreTrainedModel, rows: int, context: int, widths: list[int]) -> dict[tuple[str, int], float]:
    """Medians by kind and width."""
    ids = torch.full((rows, context), 7)
    kwargs = {CACHE: DynamicCache(config=model.config), "attention_mask": torch.ones_like(ids)}
    runner = ragged.RaggedRunner(model, kwargs, ids)
    runner.prefill()
    seconds: dict[tuple[str, int], list[float]] = {(way, width): [] for width in widths for way in WAYS}
    for _ in range(REPEATS):
        for way, width in seconds:
            with patch.object(ragged, "grouped_attention", WAYS[way]):
                began = time.perf_counter()
                runner.run(ids[:, :width])
                seconds[way, width].append(time.perf_counter() - began)
    return {kind: 1000 * statistics.median(taken[WARM_UP:]) for kind, taken in seconds.items()}


def copied(model: PreTrainedModel, rows: int, columns: int, width: int) -> float:
    """Megabytes of keys and values that stock attention writes in a forward of so many tokens a row."""
    config = model.config.get_text_config(decoder=True)
    if width == 1 or getattr(config, "num_key_value_heads", None) in (None, config.num_attention_heads):
        return 0.0
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = 2 * config.num_hidden_layers * rows * config.num_attention_heads * columns * size
    return states * model.dtype.itemsize / 1e6


def main(settings: CopySettings) -> None:
    """Every shape, both ways by turns."""
    model = settings.load().target
    table = Table("rows x tokens before", "width", *WAYS, "copied by stock")
    for rows in settings.rows:
        for context in settings.contexts:
            found = milliseconds(model, rows, context, settings.widths)
            for width in settings.widths:
                table.add_row(
                    f"{rows} x {context}",
                    str(width),
                    *(f"{found[way, width]:.1f} ms" for way in WAYS),
                    f"{copied(model, rows, context + width, width):.0f} MB",
                )
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
