"""Where the tests and timings of a GPU run, and where they write what they find."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_specdec import Drafter

DEVICE = torch.device(os.environ.get("DEVICE") or "cuda")
ROWS = "rows.jsonl"
"""in the folder `OUT`: one line per result, written as it is found"""


def synchronize() -> None:
    """Wait for the device. What has poisoned it raises here."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def note(kind: str, **row: Any) -> None:
    """Keep a result, whatever happens next."""
    if out := os.environ.get("OUT"):
        with open(Path(out) / ROWS, "a") as file:
            file.write(json.dumps({"kind": kind} | row, default=str) + "\n")


def placed(drafter: Any) -> Any:
    """A drafter whose models have been moved to the device, those of a drafter within it, too."""
    for part in vars(drafter).values():
        if isinstance(part, nn.Module):
            part.to(DEVICE)
        elif isinstance(part, Drafter):
            placed(part)
    return drafter
