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
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from place import ROWS, note
from report import write

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUT = Path(os.environ.get("OUT") or "gpu-report").resolve()
os.environ["OUT"] = str(OUT)
DEVICE = os.environ.get("DEVICE") or "cuda"
BUDGET = float(os.environ.get("BUDGET") or (450 if DEVICE.startswith("cuda") else 900))
"""seconds for all of it"""
TO_END = 25.0
"""seconds for a timing that has begun to come to its end, before the process is ended"""
AT_ONCE = max(1, min(6, (os.cpu_count() or 1) // 2 - 2))
"""processes of tests; timings run alone"""
WRITING = threading.Lock()


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
    several = name == "captured" and AT_ONCE > 1 and find_spec("xdist")  # it takes as long as all others
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", *["-n", "4"] * bool(several)]
    return Step(name, ["-m", "pytest", *options, str(HERE / f"test_gpu_{name}.py")], 120.0)


def timings(name: str, weight: float, *options: str) -> Step:
    return Step(name, [str(HERE / "timings.py"), *options], 300.0, weight)


def steps(gguf: str | None) -> tuple[list[Step], list[Step]]:
    """Tests, and timings; of both what decides most comes first."""
    names = ("text", "captured", "drafters", "faults", "transfers", "calls", "sampling", "bfloat16", "memory")
    model = ["--gguf", gguf] if gguf else []
    times = [
        timings("timings of 8 B", 7, "8B", *model),
        timings("timings of the small target", 2, "small", *model),
        timings("PEARL on one card", 2, "8B", "--pearl", *model),
    ]
    return list(filter(chosen, map(tests, names))), list(filter(chosen, times))


def chosen(step: Step) -> bool:
    """Whether `STEPS` is empty or names it, by a part of its name."""
    wanted = os.environ.get("STEPS")
    return not wanted or any(part.strip() in step.name for part in wanted.split(","))


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
    with tempfile.TemporaryFile() as log:
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
            log.seek(0)
            with WRITING, open(OUT / "log.txt", "ab") as whole:
                whole.write(f"\n===== {step.name}: {' '.join(command[1:])}\n".encode() + log.read())


def end(process: "subprocess.Popen[bytes]") -> None:
    """The process and all that it has started: its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Hour:
    """The run: what is left of its time, and what became of its steps."""

    def __init__(self) -> None:
        self.began, self.failed = time.monotonic(), False

    def left(self) -> float:
        return BUDGET - (time.monotonic() - self.began)

    def play(self, step: Step, weights: float = 1.0) -> bool:
        """Run it, say so, and write the report anew. Whether it passed.

        Args:
            weights: of this timing and those behind it.
        """
        started = time.monotonic()
        allowed = min(step.limit, self.left() * step.weight / weights - 10) if step.weight else step.limit
        at_most = min(self.left(), allowed + TO_END if step.weight else step.limit)
        outcome = run(step, at_most, allowed) if at_most > 15 else "skipped, as the time is over"
        seconds = time.monotonic() - started
        with WRITING:
            note("step", step=step.name, outcome=outcome, seconds=seconds)
            write(OUT)
            print(f"{BUDGET - self.left():5.0f} s  {step.name}: {outcome} in {seconds:.0f} s", flush=True)
        self.failed |= outcome in ("failed", "ended at its limit")
        return outcome == "passed"


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, "log.txt", "report.md", "report.json"):
        (OUT / name).unlink(missing_ok=True)
    hour, (checks, times) = Hour(), steps(os.environ.get("GGUF") or None)
    if not hour.play(Step("the machine", [str(HERE / "machine.py")], 90.0)):
        print((OUT / "log.txt").read_text()[-2000:])
        return 1
    with ThreadPoolExecutor(AT_ONCE) as together:
        list(together.map(hour.play, checks))
    for number, step in enumerate(times):
        hour.play(step, sum(later.weight for later in times[number:]))
    print((OUT / "report.md").read_text())
    return int(hour.failed)


if __name__ == "__main__":
    sys.exit(main())
