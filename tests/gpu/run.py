"""A GPU's first hour in minutes: tests, then timings, each step a process of its own; what is found is kept at once.

    DEVICE=cuda OUT=gpu-report python tests/gpu/run.py

`OUT` gets four files: `rows.jsonl` (a line per result), `log.txt`, and, anew after every step, `report.md` and
`report.json`. A step that hangs is ended at its limit; when the time is over what is left is said to be skipped. The
exit status is 1 if a test failed or a step broke off.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUT = Path(os.environ.get("OUT") or "gpu-report").resolve()
DEVICE = os.environ.get("DEVICE") or "cuda"
BUDGET = float(os.environ.get("BUDGET") or (450 if DEVICE.startswith("cuda") else 900))
"""seconds for all of it"""
TO_END = 25.0
"""seconds for a timing that has begun to come to its end, before the process is ended"""


@dataclass(frozen=True)
class Step:
    """A process: pytest over a file of tests, or timings of a size, whose share of what is left goes by its weight."""

    name: str
    command: Sequence[str]
    limit: float
    """seconds; of timings: at most"""
    weight: float = 0.0
    """0 for tests"""


def tests(name: str) -> Step:
    file = str(HERE / f"test_gpu_{name}.py")
    return Step(name, ["-m", "pytest", "-p", "no:cacheprovider", "--tb=short", file], 120.0)


def timings(name: str, weight: float, *options: str) -> Step:
    return Step(name, [str(HERE / "timings.py"), *options], 150.0, weight)


def steps(gguf: str | None) -> list[Step]:
    """What decides most comes first."""
    first = [tests(name) for name in ("text", "drafters", "faults", "transfers", "calls", "sampling", "bfloat16")]
    times = [
        timings("timings of 8 B", 4, "8B"),
        timings("timings of the small target", 2, "small"),
        timings("8 B, compiled", 3, "8B", "--compiled"),
        timings("timings of 1 B", 2, "1B"),
    ]
    real = [timings("timings of the GGUF file as 8 B", 2, "8B", "--gguf", gguf)] if gguf else []
    return [Step("the machine", [str(HERE / "machine.py")], 60.0), *first, *times, *real, tests("memory")]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"DEVICE": DEVICE, "OUT": str(OUT), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | ours | {"TOKENIZERS_PARALLELISM": "false"}


def run(step: Step, seconds: float, allowed: float) -> str:
    """Its outcome: `passed`, `failed` or `ended at its limit`.

    Args:
        seconds: until it is ended.
        allowed: what timings are told to take.
    """
    command = [sys.executable, *step.command] + (["--seconds", f"{allowed:.0f}"] if step.weight else [])
    with open(OUT / "log.txt", "ab") as log:
        log.write(f"\n===== {step.name}: {' '.join(command[1:])}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "ended at its limit"
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """The process and all that it has started: its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    sys.path.insert(0, str(HERE))
    os.environ["OUT"] = str(OUT)
    from place import ROWS, note
    from report import write

    OUT.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, "log.txt", "report.md", "report.json"):
        (OUT / name).unlink(missing_ok=True)
    began, failed = time.monotonic(), False
    todo = steps(os.environ.get("GGUF") or None)
    for number, step in enumerate(todo):
        left = BUDGET - (time.monotonic() - began)
        weights = sum(later.weight for later in todo[number:])
        allowed = min(step.limit, left * step.weight / weights - 10) if step.weight else step.limit
        at_most = min(left, allowed + TO_END if step.weight else step.limit)
        started = time.monotonic()
        outcome = run(step, at_most, allowed) if at_most > 15 else "skipped, as the time is over"
        seconds = time.monotonic() - started
        note("step", step=step.name, outcome=outcome, seconds=seconds)
        print(f"{time.monotonic() - began:5.0f} s  {step.name}: {outcome} in {seconds:.0f} s", flush=True)
        failed |= outcome in ("failed", "ended at its limit")
        write(OUT)
        if number == 0 and outcome != "passed":
            print((OUT / "log.txt").read_text()[-2000:])
            break
    print((OUT / "report.md").read_text())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
