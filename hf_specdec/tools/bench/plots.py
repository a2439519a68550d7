"""The report's pictures, as PNG."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SpeculationError
from .methods import PLAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"draft": "#5b9bd5", "verify": "#7d5ba6", "overhead": "#d9a441"}
"""where the time of a round goes → its colour"""
KINDS = {"plain decoding": "#9aa4b5", "transformers": "#d9a441", "hf_specdec": "#7d5ba6"}
"""whose method a bar is → its colour"""

Cells = dict[str, list[dict[str, Any]]]
"""title → runs"""
Draw = Callable[[Cells], "Figure | None"]


def save_plots(cells: Cells, folder: Path) -> dict[str, Path]:
    """Draw every picture that the runs have figures for; caption → file."""
    pictures: dict[str, tuple[str, Draw]] = {
        "Speed-up over plain decoding, with the 95% bootstrap interval over prompts.": ("speedup.png", speedup),
        "Time per token: in the draft, in the target, and outside both. The mark is the bare-forward bound.": (
            "time.png",
            time_split,
        ),
        "How often the i-th draft token is accepted, in the rounds that drafted at least i tokens.": (
            "acceptance.png",
            acceptance,
        ),
    }
    saved = {}
    for caption, (name, draw) in pictures.items():
        figure = draw(cells)
        if figure is not None:
            try:
                figure.savefig(folder / name, dpi=130)
            except OSError as error:
                raise SpeculationError(f"cannot write {folder / name}: {error.strerror or error}") from error
            saved[caption] = folder / name
    return saved


def speedup(cells: Cells) -> "Figure | None":
    """Bars with intervals, a panel per cell; the best one's figure is bold."""
    figure, panels = _panels(cells)
    for axes, runs in zip(panels, cells.values(), strict=True):
        best = max(run["speedup"] for run in runs)
        for y, run in enumerate(runs):
            low, high = run["speedup_interval"] or (run["speedup"], run["speedup"])
            error = [[max(run["speedup"] - low, 0)], [max(high - run["speedup"], 0)]]
            axes.barh(y, run["speedup"], xerr=error, color=KINDS[_whose(run["name"])], height=0.7)
            weight = "bold" if run["speedup"] == best else "normal"
            axes.annotate(f" {run['speedup']:.2f}", (high, y), va="center", size=8, weight=weight)
        axes.axvline(1, color="#777", linewidth=0.8)
        axes.margins(x=0.12)
    there = {_whose(run["name"]) for runs in cells.values() for run in runs}
    _legend(figure, {name: colour for name, colour in KINDS.items() if name in there})
    return figure


def _whose(name: str) -> str:
    return "plain decoding" if name == PLAIN else "transformers" if name.startswith("hf-") else "hf_specdec"


def time_split(cells: Cells) -> "Figure | None":
    """Milliseconds per token by part of the round, prefill left out."""
    figure, panels = _panels(cells)
    for axes, runs in zip(panels, cells.values(), strict=True):
        for y, run in enumerate(runs):
            left = 0.0
            for part, colour in PARTS.items():
                width = 1000 * max(run[f"{part}_seconds"], 0.0) / run["tokens"]
                axes.barh(y, width, left=left, color=colour, height=0.7)
                left += width
            axes.plot(
                [1000 * run["bare_seconds"] / run["tokens"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5
            )
        axes.set_xlabel("ms per token", size=8)
    _legend(figure, PARTS)
    return figure


def acceptance(cells: Cells) -> "Figure | None":
    """Acceptance per position, a panel per cell."""
    if not any(run["acceptance_per_position"] for runs in cells.values() for run in runs):
        return None
    figure, panels = _panels(cells, label=False)
    for axes, runs in zip(panels, cells.values(), strict=True):
        for i, run in enumerate(runs):
            if rates := run["acceptance_per_position"]:
                axes.plot(range(1, len(rates) + 1), rates, color=f"C{i}", marker="o", markersize=3, label=run["name"])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("draft position", size=8)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _panels(cells: Cells, label: bool = True) -> tuple["Figure", list[Any]]:
    """One panel per cell, one below the other (a phone shows no more), methods down the side."""
    height = max(len(runs) for runs in cells.values()) * 0.3 + 0.9 if label else 2.6
    figure = _figure(6.4, height * len(cells))
    panels = list(figure.subplots(len(cells), 1, squeeze=False).flat)
    for axes, (title, runs) in zip(panels, cells.items(), strict=True):
        axes.set_title(title, size=9)
        if label:
            axes.set_yticks(range(len(runs)), [run["name"] for run in runs], size=8)
            axes.invert_yaxis()
    return figure, panels


def _legend(figure: "Figure", colours: dict[str, str]) -> None:
    """One for all panels, above them, so that it hides nothing."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpeculationError("plots need matplotlib; install hf-specdec[bench]") from error
    return Figure(figsize=(width, height), layout="constrained")
