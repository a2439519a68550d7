"""Where and with what a measurement was made."""

import ctypes
import datetime
import gc
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hf-specdec", "torch", "transformers", "safetensors", "scipy")


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, git revision, command line, device and threads, as plain JSON values."""
    known: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git_revision": _git_revision(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    return known | (_card(device) if device.type == "cuda" else {})


def peak_memory_bytes(device: torch.device) -> int:
    """Highest use since `reset_peak_memory`: of the GPU, or of the process where there is none (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew. Where the system does not allow it, the peak is the process's so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    _leave_out_what_is_there()
    gc.collect()
    with suppress(OSError, AttributeError):  # what earlier calls have freed shall not count: glibc keeps it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


@cache
def _leave_out_what_is_there() -> None:
    """To look for garbage among all that was imported takes a fifth of a second, before every call."""
    gc.collect()
    gc.freeze()


def _command() -> str:
    """As it was typed, but for the folders in which the interpreter and its script lie."""
    words = [Path(word).name if word == sys.argv[0] else word for word in sys.orig_argv[1:]]
    return " ".join(words if words[:1] == ["hf-specdec"] else ["python", *words])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Of the checkout this package runs from, `+` for uncommitted changes; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _card(device: torch.device) -> dict[str, Any]:
    """What of a GPU decides times beside its name: memory, CUDA, and the driver where it can be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    memory = torch.cuda.get_device_properties(device).total_memory
    return {"memory_bytes": memory, "cuda": torch.version.cuda or torch.version.hip, "driver": driver}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"
