"""The report's picture: speed-ups, as PNG."""

from pathlib import Path
from typing import Any

from ...errors import SpeculationError
from .methods import PLAIN

KINDS = {"plain decoding": "#9aa4b5", "transformers": "#d9a441", "hf_specdec": "#7d5ba6"}
"""whose method a bar is → its colour"""

Cells = dict[str, list[dict[str, Any]]]
"""title → runs"""


def plot_speedups(cells: Cells, path: Path) -> None:
    """Bars with intervals, a panel per cell, one below the other: a phone shows no more. The best figure is bold.

    Raises:
        SpeculationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SpeculationError("plots need matplotlib; install hf-specdec[bench]") from error
    height = max(len(runs) for runs in cells.values()) * 0.3 + 0.9
    figure = Figure(figsize=(6.4, height * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False).flat
    for axes, (title, runs) in zip(panels, cells.items(), strict=True):
        axes.set_title(title, size=9)
        axes.set_yticks(range(len(runs)), [run["name"] for run in runs], size=8)
        axes.invert_yaxis()
        best = max(run["speedup"] for run in runs)
        for y, run in enumerate(runs):
            low, high = run["speedup_interval"] or (run["speedup"], run["speedup"])
            reach = [[max(run["speedup"] - low, 0)], [max(high - run["speedup"], 0)]]
            axes.barh(y, run["speedup"], xerr=reach, color=KINDS[_whose(run["name"])], height=0.7)
            weight = "bold" if run["speedup"] == best else "normal"
            axes.annotate(f" {run['speedup']:.2f}", (high, y), va="center", size=8, weight=weight)
        axes.axvline(1, color="#777", linewidth=0.8)
        axes.margins(x=0.12)
    there = {_whose(run["name"]) for runs in cells.values() for run in runs}
    handles = [Patch(color=colour, label=name) for name, colour in KINDS.items() if name in there]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise SpeculationError(f"cannot write {path}: {error.strerror or error}") from error


def _whose(name: str) -> str:
    return "plain decoding" if name == PLAIN else "transformers" if name.startswith("hf-") else "hf_specdec"
