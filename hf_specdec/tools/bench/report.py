"""`hf-specdec report`: result files as a page of Markdown tables, with a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import SpeculationError
from ...hub.measured import markdown
from .plots import Cells, plot_speedups
from .results import Results
from .tables import COLUMN_HELP, COLUMNS, DIFFERENCES, differences, figures, overview, title_of

PARTED = (
    "Where texts first differ from plain decoding's. The gap is the logit of plain decoding's token less that "
    "of the other token. At a near tie, the two are plain decoding's top two tokens and at most 4 rounding "
    "steps of the dtype apart, or the other token ranks third or lower and is at most 2 steps apart."
)
CAPTION = "Speed-up over plain decoding, with the 95% bootstrap interval over prompts."


def write_report(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write `report.md` and `speedup.png` into `folder`; returns what was written.

    Raises:
        SpeculationError: a result file cannot be read or is empty, or the folder cannot be written to.
    """
    files = {path: Results.load(path) for path in paths}
    for path, results in files.items():
        if not results.runs:
            raise SpeculationError(
                f"{path} holds no finished prompt; run the benchmark again, with --resume to continue it"
            )
    cells = cells_of(files)
    page, picture = folder / "report.md", folder / "speedup.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join(_parts(cells, files)) + "\n", encoding="utf-8")
    except OSError as error:
        raise SpeculationError(f"cannot write to the folder {folder}: {error.strerror or error}") from error
    plot_speedups(cells, picture)
    return [page, picture]


def cells_of(files: dict[Path, Results]) -> Cells:
    """Runs by data set, batch size and temperature; by file, too, where several measured the same."""
    titled = [(path, title_of(run), run) for path, results in files.items() for run in results.runs]
    sources: dict[str, set[Path]] = {}
    for path, title, _ in titled:
        sources.setdefault(title, set()).add(path)
    cells: Cells = {}
    for path, title, run in titled:
        cells.setdefault(f"{path.stem}: {title}" if len(sources[title]) > 1 else title, []).append(run)
    return cells


def _parts(cells: Cells, files: dict[Path, Results]) -> Iterator[str]:
    """Commands, an overview where there are several cells, each cell's figures and where its texts differ."""
    yield "# What speculation gains"
    for results in files.values():
        yield f"    {results.provenance['command']}"
        yield f"On {_machine(results.provenance)}."
    yield f"![{CAPTION}](speedup.png)"
    if len(cells) > 1:
        header, *rows = overview(cells)
        yield f"## At a glance\n\n{markdown(header, rows)}"
    for title, runs in cells.items():
        rows = [list(figures(run).values()) for run in runs]
        yield f"## {title}\n\n{markdown(COLUMNS, rows)}\n\n{_size(runs[0])}"
        if parted := differences(runs):
            yield f"{PARTED}\n\n{markdown(DIFFERENCES, parted)}"
    yield "\n".join(
        ["| column | meaning |", "|---|---|", *(f"| {name} | {said} |" for name, said in COLUMN_HELP.items())]
    )


def _size(run: dict[str, Any]) -> str:
    unit = "batches" if run["batch_size"] > 1 else "prompts"
    times = "once" if run["repeats"] == 1 else f"{run['repeats']} times, of which the median counts"
    return f"{run['prompts']} {unit}, each decoded by each method {times}."


def _machine(provenance: dict[str, Any]) -> str:
    settings, versions, threads = provenance["settings"], provenance["versions"], provenance["threads"]
    facts = [provenance["device"], f"{threads} thread{'s' * (threads != 1)}", settings["dtype"]]
    facts += [
        f"target {settings['target']}",
        f"torch {versions['torch']}",
        f"transformers {versions['transformers']}",
        provenance["time"],
    ]
    return ", ".join(facts)
