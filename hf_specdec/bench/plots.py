"""The report's pictures, as PNG."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpeculationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAFT, TARGET, OTHER = "#5b9bd5", "#7d5ba6", "#d9a441"

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
        "Speed-up predicted by Theorem 3.8 beside the measured one; on the line they agree.": ("theory.png", theory),
        "How often the i-th draft token is accepted, of the rounds that drafted that many.": (
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
    """Bars with intervals, a panel per cell."""
    figure, panels = _panels(cells)
    for axes, runs in zip(panels, cells.values(), strict=True):
        for y, run in enumerate(runs):
            interval = run["speedup_interval"]
            error = (
                [[max(run["speedup"] - interval[0], 0)], [max(interval[1] - run["speedup"], 0)]] if interval else None
            )
            axes.barh(y, run["speedup"], xerr=error, color="#9aa4b5" if run["name"] == "plain" else TARGET, height=0.7)
            axes.annotate(
                f" {run['speedup']:.2f}", (interval[1] if interval else run["speedup"], y), va="center", size=8
            )
        axes.axvline(1, color="#777", linewidth=0.8)
        axes.margins(x=0.12)
    return figure


def time_split(cells: Cells) -> "Figure | None":
    """Milliseconds per token by part of the round, prefill left out."""
    figure, panels = _panels(cells)
    for axes, runs in zip(panels, cells.values(), strict=True):
        for y, run in enumerate(runs):
            left = 0.0
            for part, color in (("draft", DRAFT), ("verify", TARGET), ("overhead", OTHER)):
                width = 1000 * max(run[f"{part}_seconds"], 0.0) / run["tokens"]
                axes.barh(y, width, left=left, color=color, height=0.7, label=part if y == 0 else None)
                left += width
            axes.plot(
                [1000 * run["bare_seconds"] / run["tokens"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5
            )
        axes.set_xlabel("ms per token", size=8)
    panels[0].legend(fontsize=8)
    return figure


def theory(cells: Cells) -> "Figure | None":
    """Predicted against measured."""
    runs = [run for runs in cells.values() for run in runs if run["predicted_speedup"] is not None]
    if not runs:
        return None
    figure = _figure(6, 5)
    axes = figure.subplots()
    for name in dict.fromkeys(run["name"] for run in runs):
        mine = [run for run in runs if run["name"] == name]
        axes.scatter([run["predicted_speedup"] for run in mine], [run["speedup"] for run in mine], label=name, s=30)
    low, high = min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())
    axes.plot([low, high], [low, high], color="#999", linewidth=0.8)
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("measured speed-up")
    axes.legend(fontsize=8)
    return figure


def acceptance(cells: Cells) -> "Figure | None":
    """Acceptance per position, a panel per cell."""
    if not any(run["acceptance_per_position"] for runs in cells.values() for run in runs):
        return None
    figure, panels = _panels(cells, label=False)
    for axes, runs in zip(panels, cells.values(), strict=True):
        for run in runs:
            if rates := run["acceptance_per_position"]:
                axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, label=run["name"])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("draft position", size=8)
        axes.legend(fontsize=7)
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


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpeculationError("plots need matplotlib; install hf-specdec[bench]") from error
    return Figure(figsize=(width, height), layout="constrained")
