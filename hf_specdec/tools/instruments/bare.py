"""The bare-forward bound: what a generation's forwards cost by themselves.

A decoding loop cannot be faster than its forwards. Each kind of forward that was made (model, rows, width) is run again
alone, right after the generation, over a cache of the average length.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...clock import now
from ...target.grouped import grouped_attention
from ...target.inputs import CACHE
from .meter import Forward, Role

REPEATS = 3
WIDTHS = 8
"""of a model and a number of rows that are timed"""

Kind = tuple[Role, int, int]
"""model, rows, tokens per row"""


def decode_forwards(forwards: Iterable[Forward]) -> list[Forward]:
    """All but the prefills."""
    return [forward for forward in forwards if forward.context > 0]


def bare_seconds(forwards: Iterable[Forward], table: Mapping[Kind, float]) -> float:
    """What these forwards take as bare forwards, prefills left out."""
    return sum(table[forward.role, forward.rows, forward.width] for forward in decode_forwards(forwards))


@torch.inference_mode()
def time_bare_forwards(
    models: Mapping[Role, PreTrainedModel], forwards: Iterable[Forward], ids: Tensor, grouped: bool = True
) -> dict[Kind, float]:
    """Seconds of each kind of forward, at the mean context length of all of them.

    Args:
        models: by role. Forwards of other models only count for the mean context length.
        forwards: the forwards that were made; prefills are left out.
        ids: [B, columns] any tokens; their values do not matter for time.
        grouped: whether heads that share keys are grouped, as in this package's rounds; else attention is stock.

    Returns:
        Medians of `REPEATS` runs, in which the kinds take turns. One token per row is always timed, also for a draft
        whose forwards no meter could see. Of many widths only the most frequent are timed; the others are interpolated.
    """
    made = decode_forwards(forwards)
    if not made:
        return {}
    context = round(statistics.mean(f.context for f in made))
    counts = Counter((f.role, f.rows, f.width) for f in made if f.role in models)
    counts.update({(role, ids.shape[0], 1): 0 for role in models})
    kinds: dict[Kind, list[float]] = {kind: [] for kind in _to_time(counts)}
    caches = {(role, rows): _prefilled(models[role], ids, rows, context) for role, rows, _ in kinds}
    with grouped_attention() if grouped else nullcontext():
        for repeat in range(REPEATS + 1):
            for (role, rows, width), seconds in kinds.items():
                elapsed = _time_one(models[role], caches[role, rows], _tile(ids, rows, width))
                if repeat:  # the first round warms up
                    seconds.append(elapsed)
    timed = {kind: statistics.median(seconds) for kind, seconds in kinds.items()}
    return {kind: _read(timed, kind) for kind in counts}


def _to_time(counts: Counter[Kind]) -> list[Kind]:
    """Of each model and number of rows the narrowest width, the widest, and those that were made most often."""
    chosen: list[Kind] = []
    for role, rows in dict.fromkeys((role, rows) for role, rows, _ in counts):
        widths = [kind for kind, _ in counts.most_common() if kind[:2] == (role, rows)]
        chosen += dict.fromkeys([min(widths), max(widths), *widths][:WIDTHS])
    return chosen


def _read(timed: Mapping[Kind, float], kind: Kind) -> float:
    """A width's own time, or what lies between its neighbours'."""
    role, rows, width = kind
    widths = sorted(w for r, b, w in timed if (r, b) == (role, rows))
    return float(np.interp(width, widths, [timed[role, rows, w] for w in widths]))


def _prefilled(model: PreTrainedModel, ids: Tensor, rows: int, context: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(input_ids=_tile(ids, rows, context), use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return cache


def _time_one(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> float:
    _synchronize(ids)
    start = now()
    model(input_ids=ids, use_cache=True, **{CACHE: cache})
    _synchronize(ids)
    seconds = now() - start
    cache.crop(-ids.shape[1])
    return seconds


def _tile(ids: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] of what was decoded, repeated where it is shorter."""
    return ids[:rows].repeat(1, -(-width // ids.shape[1]))[:, :width]


def _synchronize(ids: Tensor) -> None:
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
