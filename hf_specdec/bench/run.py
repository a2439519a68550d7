"""`hf-specdec bench`: run, show progress, keep what was measured whatever happens."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..errors import SpeculationError
from .measure import Bench
from .plan import Settings, plan
from .provenance import provenance
from .results import Results

INTERRUPTED = 130


def run_bench(settings: Settings, path: Path, resume: bool = False) -> int:
    """Measure and write `path` after every prompt; returns the exit status.

    Raises:
        SpeculationError: bad settings, prompt files or models, a result file that exists or was made with other
            settings, or a disk that is full. What was measured before stays in `path`.
    """
    settings.check()
    units = plan(settings)
    held = _held(settings, path, resume)
    bench = Bench(settings)
    results = held or Results(provenance(bench.device) | {"settings": _plain(settings)})
    results.save(path)  # now rather than after an hour, if the disk does not take it
    missing = len({unit.key for unit in units} - {m.unit for m in results.measurements})
    try:
        with tqdm(total=len(units), initial=len(units) - missing, unit="prompt", smoothing=0.1) as bar:
            bench.run(results, units, save=lambda results: results.save(path), done=bar.update)
    except KeyboardInterrupt:
        done = len({m.unit for m in results.measurements})
        Console(stderr=True).print(
            f"\nstopped: {path} holds {done} of {len(units)} prompts; --resume goes on from there"
        )
        return INTERRUPTED
    if not results.measurements:
        raise SpeculationError("no prompt fits into the target's context with this max_new_tokens; lower it")
    Console().print(summary_table(results.runs))
    return 0


def summary_table(runs: list[dict[str, Any]]) -> Table:
    """The figures that matter most, for the terminal."""
    table = Table(
        "data", "batch", "T", "method", "tok/s", "speed-up", "95%", "tokens/call", "α", "c", "theory", "bound"
    )
    for run in runs:
        low_high = run["speedup_interval"]
        table.add_row(
            run["dataset"],
            str(run["batch_size"]),
            f"{run['temperature']:g}",
            run["name"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}",
            f"{low_high[0]:.2f}-{low_high[1]:.2f}" if low_high else "-",
            f"{run['mean_acceptance_length']:.2f}",
            _number(run["alpha"]),
            _number(run["c"]),
            _number(run["predicted_speedup"]),
            f"{run['bound_share']:.0%}" if run["bound_share"] else "-",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plain(settings: Settings) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def _held(settings: Settings, path: Path, resume: bool) -> Results | None:
    """What a result file that is already there holds, if it may be gone on with."""
    if not path.exists():
        return None
    if not resume:
        raise SpeculationError(f"{path} exists; add --resume to go on with it, or name another file")
    results = Results.load(path)
    before, now = results.provenance.get("settings", {}), _plain(settings)
    if changed := [name for name in now if before.get(name) != now[name]]:
        raise SpeculationError(
            f"cannot resume {path}: it was made with another {', '.join(changed)}; name another file"
        )
    return results
