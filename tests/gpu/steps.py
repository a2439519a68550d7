"""Which steps are to be run, and what they have found: lines of `OUT/rows.jsonl`, there at once and to stay."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROWS = "rows.jsonl"


def note(kind: str, **row: Any) -> None:
    """Keep a result, whatever happens next."""
    if out := os.environ.get("OUT"):
        with open(Path(out) / ROWS, "a") as file:
            file.write(json.dumps({"kind": kind} | row, default=str) + "\n")


def read(out: Path) -> dict[str, list[Row]]:
    """Rows by kind. A line that was being written when the run broke off is left out."""
    found: dict[str, list[Row]] = defaultdict(list)
    for line in (out / ROWS).read_text().splitlines() if (out / ROWS).exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row.pop("kind")].append(row)
    return found


def chosen(step: str) -> bool:
    """Whether `STEPS` is empty or names it, by a part of its name."""
    wanted = os.environ.get("STEPS")
    return not wanted or any(part.strip() in step for part in wanted.split(","))
