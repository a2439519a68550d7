"""`hf-specdec report`: result files into a Markdown table, PNG plots and one self-contained HTML page."""

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...errors import SpeculationError
from ..showing.page import cards, html_page, write_page
from ..showing.pretended import pretended_costs
from .plots import Cells, save_plots
from .results import Results
from .tables import COLUMN_HELP, COLUMNS, DIFFERENCES, differences, figures, overview

TITLE = "What speculation gains"
PARTED = (
    "Where texts first differ from plain decoding's. The gap is the logit of plain decoding's token less that "
    "of the other token. At a near tie, the two are plain decoding's top two tokens and at most 4 rounding "
    "steps of the dtype apart, or the other token ranks third or lower and is at most 2 steps apart."
)


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
    titled = [(path, _title(run), run) for path, results in files.items() for run in results.runs]
    sources: dict[str, set[Path]] = {}
    for path, title, _ in titled:
        sources.setdefault(title, set()).add(path)
    cells: Cells = {}
    for path, title, run in titled:
        cells.setdefault(f"{path.stem}: {title}" if len(sources[title]) > 1 else title, []).append(run)
    return cells


def _title(run: dict[str, Any]) -> str:
    return f"{run['dataset']}, batch {run['batch_size']}, T={run['temperature']:g}"


def report_markdown(cells: Cells, files: dict[Path, Results], plots: dict[str, Path]) -> str:
    """Tables, pictures and commands."""
    parts = [f"# {TITLE}\n"]
    for results in files.values():
        parts += [f"    {results.provenance['command']}\n", f"On {_machine(results.provenance)}.\n"]
    if len(cells) > 1:
        header, *rows = overview(cells)
        parts += ["## At a glance\n", markdown_table(header, rows) + "\n"]
    for title, runs in cells.items():
        table = markdown_table(COLUMNS, (figures(run).values() for run in runs))
        parts += [f"## {title}\n", table, f"\n{_size(runs)}\n"]
        if parted := differences(runs):
            parts += [f"{PARTED}\n", markdown_table(DIFFERENCES, parted) + "\n"]
    parts += [f"![{caption}]({path.name})\n" for caption, path in plots.items()]
    parts += ["| column | meaning |\n|---|---|", *(f"| {name} | {text} |" for name, text in COLUMN_HELP.items())]
    return "\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Text to the left in the first column, figures to the right in the others."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report_html(cells: Cells, files: dict[Path, Results], plots: dict[str, Path]) -> str:
    """One page with everything inside it."""
    best = max((run for runs in cells.values() for run in runs), key=lambda run: run["speedup"])
    sections = "".join(
        f'<h2>{escape(title)}</h2><div class="wide">{_html_table(runs)}</div><p class="soft">{_size(runs)}</p>'
        f"{_html_differences(runs)}"
        for title, runs in cells.items()
    )
    glance = ""
    if len(cells) > 1:
        header, *rows = overview(cells)
        glance = f'<h2>At a glance</h2><div class="wide">{_plain_table(header, rows)}</div>'
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
        f"{headline}{glance}{sections}<h2>Pictures</h2>{pictures}"
        f"<h2>What the columns say</h2><dl>{meanings}</dl>{sources}"
    )
    return html_page(TITLE, body)


def _html_table(runs: list[dict[str, Any]]) -> str:
    best = max(runs, key=lambda run: run["speedup"])
    head = "".join(f'<th title="{escape(COLUMN_HELP.get(name, ""), quote=True)}">{name}</th>' for name in COLUMNS)
    rows = "".join(
        f"<tr{' class=best' if run is best else ''}>"
        + "".join(f"<td>{escape(value)}</td>" for value in figures(run).values())
        + "</tr>"
        for run in runs
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _html_differences(runs: list[dict[str, Any]]) -> str:
    parted = differences(runs)
    return f'<p>{escape(PARTED)}</p><div class="wide">{_plain_table(DIFFERENCES, parted)}</div>' if parted else ""


def _plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = ("".join(f"<td>{escape(value)}</td>" for value in line) for line in (header, *rows))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{body}</tbody></table>"


def _size(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    unit = "batches" if first["batch_size"] > 1 else "prompts"
    times = "once" if first["repeats"] == 1 else f"{first['repeats']} times, of which the median counts"
    return f"{first['prompts']} {unit}, each decoded by each method {times}."


def _machine(provenance: dict[str, Any]) -> str:
    settings, versions, threads = provenance["settings"], provenance["versions"], provenance["threads"]
    facts = [provenance["device"], f"{threads} thread{'s' * (threads != 1)}", settings["dtype"]]
    facts += [f"target {settings['target']}", *pretended_costs(settings)]
    facts += [f"torch {versions['torch']}", f"transformers {versions['transformers']}", provenance["time"]]
    return ", ".join(facts)
