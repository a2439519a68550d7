"""The oracle: the best lookahead of every iteration, known only afterwards (Mamou 2024, §3 and Appendix A)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_specdec.errors import SpeculationError
from hf_specdec.train.disco.simulation import Costs, Round, Values


def oracle_rounds(values: Values) -> list[Round]:
    """One text's rounds where each drafts exactly the tokens that will be accepted."""
    end, start, rounds = len(values.there), 1, []
    while start < end:
        run = 0
        while run < end - start - 1 and values.accepted[start + run]:
            run += 1
        rounds.append(Round(run, run))
        start += run + 1
    return rounds


def least_seconds(values: Values, costs: Costs) -> float:
    """What the best choice of all lookaheads costs for one text; fewer than the oracle's where a step does not pay."""
    end = len(values.there)
    best = [0.0] * (end + 2)  # from each position to the end
    run = 0  # accepted tokens from the position on
    for start in range(end - 1, 0, -1):
        run = min(run + 1, end - start - 1) if values.accepted[start] else 0
        best[start] = min(costs.seconds([Round(k, k)]) + best[start + k + 1] for k in range(run + 1))
    return best[1]


@dataclass(frozen=True)
class OracleReport:
    """Table 2 of the paper, and the bound that the oracle sets."""

    mean: float
    """lookahead per iteration"""
    deviation: float
    iterations: int
    seconds: float
    """no choice of lookaheads decodes these texts in less, by the costs given"""
    plain_seconds: float

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def oracle_report(values: Sequence[Values], costs: Costs) -> OracleReport:
    """Mean, deviation and latency bound over all iterations of all texts."""
    rounds = [oracle_rounds(value) for value in values]
    lookaheads = [r.drafted for text in rounds for r in text]
    if not lookaheads:
        raise SpeculationError("the texts are too short for a single draft; record longer ones")
    plain = sum(len(value.there) - 1 for value in values) * costs.verify(1)
    seconds = sum(least_seconds(value, costs) for value in values)
    return OracleReport(statistics.fmean(lookaheads), statistics.pstdev(lookaheads), len(lookaheads), seconds, plain)


def plot_oracle(values: Sequence[Values], name: str, static: int, folder: str | Path) -> list[Path]:
    """Figures 2, 3 (and 5) and 4 as PNG files.

    Args:
        static: the window to draw beside the oracle's in the first text.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SpeculationError("plots need matplotlib; pip install 'hf-specdec[bench]'") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [[r.drafted for r in oracle_rounds(value)] for value in values]
    texts = [text for text in texts if text]
    paths = [folder / f"{name}-{kind}.png" for kind in ("example", "by-iteration", "histogram")]

    figure, axes = plt.subplots(figsize=(7, 3))
    axes.bar(range(len(texts[0])), texts[0], label="oracle")
    axes.axhline(static, color="tab:red", label=f"static {static}")
    axes.set(xlabel="iteration", ylabel="lookahead", title=f"{name}: one text")
    axes.legend()
    _save(plt, figure, paths[0])

    index = np.concatenate([np.linspace(0, 1, len(text)) for text in texts])
    lookahead = np.concatenate(texts)
    bins = np.minimum((index * 20).astype(int), 19)
    means = [lookahead[bins == i].mean() if (bins == i).any() else 0.0 for i in range(20)]
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.bar(np.arange(20) / 20, means, width=0.045, align="edge")
    axes.set(xlabel="normalized iteration", ylabel="mean oracle lookahead", title=f"{name}: {len(texts)} texts")
    _save(plt, figure, paths[1])

    figure, axes = plt.subplots(figsize=(7, 3))
    sizes, counts = np.unique(lookahead, return_counts=True)
    axes.bar(sizes, counts / counts.sum())
    axes.set(xlabel="oracle lookahead", ylabel="share of iterations", title=name)
    _save(plt, figure, paths[2])
    return paths


def _save(plt: object, figure: object, path: Path) -> None:
    figure.tight_layout()  # type: ignore[attr-defined]
    figure.savefig(path, dpi=120)  # type: ignore[attr-defined]
    plt.close(figure)  # type: ignore[attr-defined]
