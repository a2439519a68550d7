"""One call of `generate` by a method, and what it took."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from place import DEVICE, synchronize
from subjects import DRY
from torch import Tensor

from hf_specdec.errors import SpeculationWarning
from hf_specdec.tools.bench.method import Method
from hf_specdec.tools.bench.methods import build_method
from hf_specdec.tools.instruments.meter import Meter, metered
from hf_specdec.tools.instruments.provenance import peak_memory_bytes, reset_peak_memory

NEW = 4 if DRY else 128
"""tokens of each generation"""
FEW = 4 if DRY else 32
"""tokens where one generation shows it all"""
STATIC = "plain, static cache"
"""which transformers compiles on a GPU"""
PLAIN = "plain, captured"
CAPTURED = (PLAIN, "prompt_lookup, captured", "draft_model, captured", "hybrid, captured")
"""after a comma how forwards run"""


@dataclass
class Run:
    """What one call took."""

    seconds: float
    """by the wall, from the call to the last token on the host"""
    meter: Meter | None
    text: list[list[int]]
    peak_bytes: int
    warned: list[str]


def generate(target: Any, inputs: dict[str, Tensor], method: Method, meter: bool = True, **options: Any) -> Run:
    reset_peak_memory(DEVICE)
    with warnings.catch_warnings(record=True) as caught, method.prepared():
        warnings.simplefilter("always", SpeculationWarning)
        synchronize()
        began = time.perf_counter()
        with metered(target, method.draft) if meter and method.name != STATIC else _unmetered() as found:
            output = target.generate(**inputs, **options, **method.kwargs)
        synchronize()
        seconds = time.perf_counter() - began
    text = output[:, inputs["input_ids"].shape[1] :].tolist()
    warned = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    return Run(seconds, found, text, peak_memory_bytes(DEVICE), warned)


@contextmanager
def _unmetered() -> Iterator[None]:
    """What is compiled would be compiled with its meter."""
    yield None


def method_of(name: str, draft: Any) -> Method:
    """A method, and how its forwards run."""
    spec, _, forwards = name.partition(", ")
    method = build_method(spec, draft)
    method.name = name
    if forwards:
        known = {"cache_implementation": "static"} if name == STATIC else {"speculation": {"forwards": forwards}}
        method.kwargs |= known
    return method


def figures(run: Run, method: Method) -> dict[str, Any]:
    """A row of the report, but for what it is about."""
    tokens = sum(map(len, run.text))
    row: dict[str, Any] = {"tokens": tokens, "seconds": run.seconds, "text": run.text}
    row |= {"peak_bytes": run.peak_bytes, "warned": run.warned}
    if run.meter is not None:
        steps, drafts = ([f for f in run.meter.of(role) if f.context] for role in ("target", "draft"))
        beside = run.meter.decode_seconds - sum(f.seconds for f in steps)
        if not method.name.startswith("pearl"):  # which drafts meanwhile
            beside -= sum(f.seconds for f in drafts)
        row |= {
            "rounds": len(steps),
            "draft_forwards": len(drafts),
            "target_seconds": sum(f.seconds for f in steps),
            "draft_seconds": sum(f.seconds for f in drafts),
            "prefill_seconds": run.meter.prefill_seconds,
            "beside_seconds": beside,
        }
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        row |= {"mode": stats.mode, "alpha": stats.alpha, "notes": stats.notes}
    return row
