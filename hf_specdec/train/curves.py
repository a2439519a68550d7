"""`Curves`: the figures of a training by step, drawn anew at each examination."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

PREFIX = "eval_"
"""of the figures on texts that are held out"""


class Curves(TrainerCallback):
    """Keeps a PNG up to date, of the loss and of shares on held-out texts. Nothing where matplotlib is not installed: a
    training does not fail for a picture."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The log of a run that goes on is that of the whole training."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        shares, losses = figure.subplots(1, 2)
        for name, points in _curves(state.log_history).items():
            axes = losses if name == "loss" else shares
            axes.plot(*zip(*points, strict=True), label=name.removeprefix(PREFIX).replace("_", " "))
        shares.set(xlabel="step", title="held-out texts", ylim=(0, 1))
        losses.set(xlabel="step", title="loss")
        if shares.lines:
            shares.legend(fontsize=7)
        figure.savefig(self.path, dpi=150)


def _curves(log: Iterable[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """What was logged more than once, by step: the loss, and of held-out figures those that are shares."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in log:
        for name, value in line.items():
            if name == "loss" or (name.startswith(PREFIX) and 0 <= value <= 1):
                curves.setdefault(name, []).append((line["step"], value))
    return {name: points for name, points in curves.items() if len(points) > 1}
