"""`hf-specdec bench`: run, show progress, and keep what was measured whatever happens."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ...errors import SpeculationError
from ..instruments.provenance import provenance
from .best import check_new, conclude
from .measure import Bench
from .plan import Settings, plan
from .results import Results
from .summary import check_installed
from .tables import DIFFERENCES, NARROW, differences, figures, title_of

INTERRUPTED = 130
MOST_DIFFERENCES = 10
LOOKS: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
METHOD_WIDTH = 20
"""letters for which a terminal of 80 columns has room"""


def run_bench(settings: Settings, path: Path, resume: bool = False, write: Path | None = None) -> int:
    """Measure and write `path` after every prompt; returns the exit status.

    Args:
        write: a new folder for the best drafter.

    Raises:
        SpeculationError: bad settings, prompt files or models, a result file that exists or was made with other
            settings, a missing package, or a disk that is full. What was measured before stays in `path`.
    """
    settings.check()
    check_installed()
    units = plan(settings)
    held = _held(settings, path, resume)
    if write is not None:
        check_new(write)
    bench = Bench.load(settings)
    results = held or Results(provenance(bench.device) | bench.about() | {"settings": asdict(settings)})
    results.save(path)  # now rather than after an hour, if the disk does not take it
    missing = len({unit.key for unit in units} - {m.unit for m in results.measurements})
    try:
        with tqdm(total=len(units), initial=len(units) - missing, unit="prompt", smoothing=0.1) as bar:

            def keep(results: Results) -> None:
                results.save(path)
                bar.update()

            bench.run(results, units, keep)
    except KeyboardInterrupt:
        done = len({m.unit for m in results.measurements})
        Console(stderr=True).print(
            f"\nstopped: {path} holds {done} of {len(units)} prompts; run the same command with --resume to continue"
        )
        return INTERRUPTED
    if not results.measurements:
        raise SpeculationError(
            f"no prompt fits into the target's context together with max_new_tokens={settings.max_new_tokens}; lower it"
        )
    for table in summary_tables(results.runs):
        Console().print(table)
    said = conclude(bench, results.runs, path, write)
    Console().print(said, markup=False, highlight=False, soft_wrap=True)
    return 0


def summary_tables(runs: list[dict[str, Any]]) -> Iterator[Table]:
    """The figures that matter most, a table per data set, batch size and temperature, for the terminal."""
    for title in dict.fromkeys(map(title_of, runs)):
        mine = [run for run in runs if title_of(run) == title]
        table = Table(title=title, **LOOKS)
        table.add_column(NARROW[0], overflow="fold", max_width=METHOD_WIDTH)  # the only one that gives way
        for name in NARROW[1:]:
            table.add_column(name.replace("/call", "\n/call").replace(" text", "\ntext"), justify="right", no_wrap=True)
        for run in mine:
            method, *numbers, same = (figures(run)[name] for name in NARROW)
            table.add_row(_broken(method), *numbers, same.replace(" (", "\n("))
        yield table
        if parted := differences(mine):
            yield _difference_table(parted)


def _difference_table(parted: list[list[str]]) -> Table:
    """Where texts first part from plain decoding's, as many as a terminal has room for."""
    more = f"; {len(parted) - MOST_DIFFERENCES} more in `hf-specdec report`" if len(parted) > MOST_DIFFERENCES else ""
    table = Table(title=f"where texts first differ from plain decoding's{more}", **LOOKS)
    for name in DIFFERENCES:
        table.add_column(name, justify="left" if name in DIFFERENCES[:2] else "right", overflow="fold")
    for row in parted[:MOST_DIFFERENCES]:
        table.add_row(_broken(row[0]), *row[1:])
    return table


def _broken(method: str) -> str:
    """A long method's name in lines, an option each."""
    return method if len(method) <= METHOD_WIDTH else method.replace(":", ":\n  ", 1).replace(",", ",\n  ")


def _held(settings: Settings, path: Path, resume: bool) -> Results | None:
    """What a result file that is already there holds, if it may be gone on with."""
    if not path.exists():
        return None
    if not resume:
        raise SpeculationError(f"{path} exists; add --resume to continue it, or name another file")
    results = Results.load(path)
    before, now = results.provenance.get("settings", {}), asdict(settings)
    if unknown := [name for name in now if name not in before]:
        raise SpeculationError(
            f"cannot resume {path}: it was made by a version without the setting {', '.join(unknown)}; name "
            "another file"
        )
    if changed := [name for name in before | now if before.get(name) != now.get(name)]:
        raise SpeculationError(
            f"cannot resume {path}: it was made with another {', '.join(changed)}; name another file"
        )
    return results
