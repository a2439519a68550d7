"""Where the tests and timings of a GPU run."""

import os
from typing import Any

import torch
from torch import nn

from hf_specdec import Drafter

DEVICE = torch.device(os.environ.get("DEVICE") or "cuda")


def synchronize() -> None:
    """Wait for the device. What has poisoned it raises here."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def placed(drafter: Any) -> Any:
    """A drafter whose models have been moved to the device, those of a drafter within it, too."""
    for part in vars(drafter).values():
        if isinstance(part, nn.Module):
            part.to(DEVICE)
        elif isinstance(part, Drafter):
            placed(part)
    return drafter
