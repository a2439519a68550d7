"""What every drafter does on set times, cell by cell: `python tests/replay.py --against FILE` says which cells changed.

For work on the engine that is to change nothing: `python tests/replay.py FILE` before it, the comparison after each
step. A cell is a drafter, greedy, sampled or coupled, one row or four, forwards recorded or not; of it are kept the
texts, target and draft calls, how wide each verification was, and who proposed. PEARL's rounds are its worker's, too,
which goes by its own clock: of it the texts are compared.
"""

import itertools
import json
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS / "helpers", TESTS / "gpu"):  # this checkout's package, whatever is installed
    sys.path.insert(0, str(folder))

os.environ["DEVICE"] = "cpu"

import clocks  # noqa: E402
import models  # noqa: E402
from every_drafter import PAIRS, VOCAB  # noqa: E402

import hf_specdec  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "coupled": {"do_sample": True, "top_k": 0, "speculation": {"sampling": "coupled"}},
}
ROWS = {"one row": [9], "four rows": [9, 5, 1, 7]}
FORWARDS = {"eager": "eager", "recorded": "captured"}
NEW = 40


def cell(kind: str, mode: str, rows: str, forwards: str) -> dict[str, Any]:
    """What one call did, twice: the second meets what the first has taught the drafter."""
    clocks.forget()
    with clocks.set_times(), clocks.adapting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        target, drafter = PAIRS[kind]()
        seen: dict[str, Any] = {"texts": [], "calls": [], "widths": [], "sources": []}
        for seed in range(2):
            torch.manual_seed(seed)
            options = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None} | MODES[mode]
            options["speculation"] = options.get("speculation", {}) | {"forwards": FORWARDS[forwards]}
            texts = target.generate(**models.prompts(ROWS[rows], VOCAB), **options, assistant_model=drafter)
            stats = drafter.last_stats
            seen["texts"].append(zlib.crc32(texts.numpy().tobytes()))
            if "pearl" not in kind:
                seen["calls"].append([stats.target_calls, stats.draft_calls, stats.row_steps, stats.accepted_tokens])
                seen["widths"].append(sorted(stats.verify_widths.items()))
                seen["sources"].append(sorted(stats.sources.items()))
    return json.loads(json.dumps(seen))


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in itertools.product(PAIRS, MODES, ROWS, FORWARDS):
        try:
            yield ", ".join(one), cell(*one)
        except hf_specdec.SpeculationError as error:
            yield ", ".join(one), {"refused": str(error)}


def main(
    file: Annotated[Path | None, typer.Argument(help="written, or compared with")] = None,
    against: Annotated[Path | None, typer.Option(help="a file that was written before")] = None,
) -> None:
    """Write what every cell does, or say which cells do something else than before."""
    before = json.loads(against.read_text()) if against else {}
    found, changed = {}, 0
    for name, seen in cells():
        found[name] = seen
        if against and seen != before.get(name):
            changed += 1
            parts = [part for part in seen if seen[part] != before.get(name, {}).get(part)]
            typer.echo(f"{name}: {', '.join(parts)}")
    if file:
        file.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
    typer.echo(f"{changed} of {len(found)} cells changed" if against else f"{len(found)} cells")
    raise typer.Exit(bool(changed))


if __name__ == "__main__":
    typer.run(main)
