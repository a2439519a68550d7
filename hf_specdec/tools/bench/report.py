"""`hf-specdec report`: result files as a Markdown page, PNG plots and one self-contained HTML page."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ...errors import SpeculationError
from ...hub.measured import markdown as table_of
from ..showing import cards, html_page, html_table, write_page
from .plots import Cells, save_plots
from .results import Results
from .tables import COLUMN_HELP, COLUMNS, DIFFERENCES, differences, figures, overview, title_of

TITLE = "What speculation gains"
PARTED = (
    "Where texts first differ from plain decoding's. The gap is the logit of plain decoding's token less that "
    "of the other token. At a near tie, the two are plain decoding's top two tokens and at most 4 rounding "
    "steps of the dtype apart, or the other token ranks third or lower and is at most 2 steps apart."
)


@dataclass
class Section:
    """A table of the report with the text around it."""

    title: str
    """empty where the section goes on"""
    before: str
    header: Sequence[str]
    rows: list[list[str]]
    after: str = ""
    best: int | None = None
    """the row to point out"""


def write_report(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write `report.md`, `report.html` and the plots into `folder`; returns what was written.

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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpeculationError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    plots = save_plots(cells, folder)
    markdown, page = folder / "report.md", folder / "report.html"
    write_page(markdown, report_markdown(cells, files, plots))
    write_page(page, report_html(cells, files, plots))
    return [markdown, page, *plots.values()]


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


def sections(cells: Cells) -> Iterable[Section]:
    """All tables: an overview where there are several cells, and for each cell its figures and where texts differ."""
    if len(cells) > 1:
        header, *rows = overview(cells)
        yield Section("At a glance", "", header, rows)
    for title, runs in cells.items():
        best = max(range(len(runs)), key=lambda i: runs[i]["speedup"])
        rows = [list(figures(run).values()) for run in runs]
        yield Section(title, "", COLUMNS, rows, _size(runs), best)
        if parted := differences(runs):
            yield Section("", PARTED, DIFFERENCES, parted)


def report_markdown(cells: Cells, files: dict[Path, Results], plots: dict[str, Path]) -> str:
    """Commands, tables and pictures."""
    parts = [f"# {TITLE}"]
    for results in files.values():
        parts += [f"    {results.provenance['command']}", f"On {_machine(results.provenance)}."]
    for section in sections(cells):
        table = table_of(section.header, section.rows)
        parts += filter(None, [section.title and f"## {section.title}", section.before, table, section.after])
    parts += [f"![{caption}]({path.name})" for caption, path in plots.items()]
    rows = "\n".join(f"| {name} | {text} |" for name, text in COLUMN_HELP.items())
    return "\n\n".join([*parts, f"| column | meaning |\n|---|---|\n{rows}"]) + "\n"


def report_html(cells: Cells, files: dict[Path, Results], plots: dict[str, Path]) -> str:
    """One page with everything inside it."""
    best = max((run for runs in cells.values() for run in runs), key=lambda run: run["speedup"])
    tables = "".join(
        (f"<h2>{escape(section.title)}</h2>" if section.title else "")
        + (f"<p>{escape(section.before)}</p>" if section.before else "")
        + html_table(section.header, section.rows, COLUMN_HELP, section.best)
        + (f'<p class="soft">{escape(section.after)}</p>' if section.after else "")
        for section in sections(cells)
    )
    pictures = "".join(
        f'<figure><img alt="{escape(caption, quote=True)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"><figcaption>{escape(caption)}</figcaption></figure>'
        for caption, path in plots.items()
    )
    meanings = "".join(f"<dt><b>{escape(k)}</b></dt><dd>{escape(v)}</dd>" for k, v in COLUMN_HELP.items())
    sources = "".join(
        f"<details><summary>How {escape(path.name)} was measured</summary>"
        f"<pre>{escape(json.dumps(results.provenance, indent=1))}</pre></details>"
        for path, results in files.items()
    )
    headline = cards(
        {
            f"best: {best['name']} on {best['dataset']}, T={best['temperature']:g}": f"{best['speedup']:.2f}x",
            "methods": str(len({run["name"] for runs in cells.values() for run in runs})),
            "generations measured": str(sum(len(results.measurements) for results in files.values())),
        }
    )
    body = (
        f'<h1>{TITLE}</h1><p class="soft">{escape(_machine(next(iter(files.values())).provenance))}</p>'
        f"{headline}{tables}<h2>Pictures</h2>{pictures}"
        f"<h2>What the columns say</h2><dl>{meanings}</dl>{sources}"
    )
    return html_page(TITLE, body)


def _size(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    unit = "batches" if first["batch_size"] > 1 else "prompts"
    times = "once" if first["repeats"] == 1 else f"{first['repeats']} times, of which the median counts"
    return f"{first['prompts']} {unit}, each decoded by each method {times}."


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
