"""What gained most in a run, named and saved."""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from ...errors import SpeculationError
from ..loading.outputs import writable_folder
from .measure import Bench
from .methods import PLAIN


def mean_speedups(runs: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Times plain decoding's speed by method, the best first, of those that were measured on everything."""
    speedups: dict[str, list[float]] = {}
    for run in runs:
        speedups.setdefault(run["name"], []).append(run["speedup"])
    plain = speedups.pop(PLAIN, [])
    means = {name: fmean(each) for name, each in speedups.items() if len(each) == len(plain)}
    return dict(sorted(means.items(), key=lambda found: -found[1]))


def check_new(folder: Path) -> None:
    """
    Raises:
        SpeculationError: nothing can be written there, or a drafter was.
    """
    if (writable_folder(folder, "write") / "config.json").exists():
        raise SpeculationError(f"write {str(folder)!r} holds a drafter already; name a new folder")


def conclude(bench: Bench, runs: Iterable[dict[str, Any]], path: Path, folder: Path | None) -> str:
    """Which method is best, in words; the best drafter is saved if it beats plain decoding and has a folder.

    Args:
        path: the result file, whose figures go into the drafter's card.
    """
    means = mean_speedups(runs)
    faster = [name for name, speedup in means.items() if speedup > 1]
    if not faster:
        best = next((f": the best, {name}, runs at {speedup:.2f}x" for name, speedup in means.items()), "")
        return f"nothing beats plain decoding{best}"
    said = f"best: {faster[0]}, {means[faster[0]]:.2f}x plain decoding"
    if folder is None:
        return said
    drafters = {method.name: method.drafter for method in bench.passes[0]}
    for name in faster:
        if (drafter := drafters[name]) is not None:
            drafter.save_pretrained(folder, target=bench.target, tokenizer=bench.tokenizer, results=path)
            return f"{said}; {name} is in {folder}"
    return f"{said}; it is transformers' own, and no drafter beats plain decoding"
