"""The card's eight minutes: what is worth most comes first, and what is found is kept at once.

    DEVICE=cuda OUT=gpu-report python tests/gpu/run.py

`OUT` gets `rows.jsonl` (a line per result), `log.txt`, after every step `report.md` and `report.json` anew, and at last
`inductor.tar.gz`: what was compiled, for `INDUCTOR` of the next run. The exit status is 1 if a test failed or a step
broke off.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from report import write
from steps import ROWS, chosen, note, read

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUT = Path(os.environ.get("OUT") or "gpu-report").resolve()
os.environ["OUT"] = str(OUT)
DEVICE = os.environ.get("DEVICE") or "cuda"
BUDGET = float(os.environ.get("BUDGET") or 480)
"""seconds for all of it"""
FOR_TESTS = 0.2 * BUDGET
"""of these, for the tests behind the timings"""
LEAST = 15.0
"""seconds, with less a step is not begun"""
AT_ONCE = max(1, min(6, (os.cpu_count() or 1) // 2 - 2))
"""processes of tests; timings run alone"""
COMPILED = Path(tempfile.gettempdir()) / "hf_specdec_inductor"
"""the same in each run: what was compiled says where it lies"""
SITE = Path(tempfile.gettempdir()) / "hf_specdec_wheels"
FIRST = "test_gpu_captured.py::test_recordings_outlive_others_and_compiled_models"
"""without which no other figure of recorded forwards would mean anything"""
TESTS = ("text", "captured", "drafters", "faults", "transfers", "calls", "sampling", "memory")
WRITING = threading.Lock()


def environment() -> dict[str, str]:
    folders = [SITE, ROOT, HERE, ROOT / "tests" / "helpers", os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    ours = {"DEVICE": DEVICE, "OUT": str(OUT), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | ours | {"TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_CACHE_DIR": str(COMPILED)}


def prepare() -> None:
    """An empty `OUT`, the wheels of `WHEELS` before what is installed, and what earlier runs have compiled."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, "log.txt", "report.md", "report.json"):
        (OUT / name).unlink(missing_ok=True)
    shutil.rmtree(SITE, ignore_errors=True)
    if wheels := sorted(Path(os.environ.get("WHEELS") or os.devnull).glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--find-links", str(wheels[0].parent), "--target", SITE, *wheels], check=True)
    if packed := os.environ.get("INDUCTOR"):
        shutil.unpack_archive(packed, COMPILED)


def run(name: str, command: Sequence[str], seconds: float) -> str:
    """Its outcome, `passed`, `failed` or `ended at its limit`; what it printed goes into the log."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
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
                whole.write(f"\n===== {name}: {' '.join(command)}\n".encode() + log.read())


def end(process: "subprocess.Popen[bytes]") -> None:
    """The process and all that it has started: its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Hour:
    """The run: what is left of its time, and what became of its steps."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def left(self) -> float:
        return BUDGET - (time.monotonic() - self.began)

    def ended(self, name: str, outcome: str, seconds: float) -> None:
        with WRITING:
            note("step", step=name, outcome=outcome, seconds=seconds)
            write(OUT)
            print(f"{BUDGET - self.left():5.0f} s  {name}: {outcome} in {seconds:.0f} s", flush=True)

    def test(self, name: str, file: str) -> None:
        """A file's tests, or one of them."""
        pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
        began = left = self.left()
        outcome = run(name, [*pytest, str(HERE / file)], left) if left > LEAST else "skipped, as the time is over"
        self.ended(name, outcome, began - self.left())

    def time(self) -> None:
        """In one process, which says what it does; where it breaks off, in another one without what it was at."""
        began, begun, outcome = self.left(), -1, "skipped, as the time is over"
        while (allowed := self.left() - FOR_TESTS) > LEAST and begun < (begun := len(read(OUT)["begun"])):
            outcome = run("timings", ["-m", "timings", f"{allowed:.0f}"], allowed + LEAST)
            if outcome == "passed":
                break
        if COMPILED.exists():
            shutil.make_archive(str(OUT / "inductor"), "gztar", COMPILED)
        self.ended("timings", outcome, began - self.left())


def main() -> int:
    hour = Hour()
    prepare()
    if chosen("recordings"):
        hour.test("recordings", FIRST)
    hour.time()
    with ThreadPoolExecutor(AT_ONCE) as together:
        for name in filter(chosen, TESTS):
            together.submit(hour.test, name, f"test_gpu_{name}.py")
    print((OUT / "report.md").read_text())
    found = read(OUT)
    ended = {row["step"]: row["outcome"] for row in found["step"]}
    broken_off = any(row["step"] not in ended for row in found["begun"])
    return int(broken_off or any(outcome in ("failed", "ended at its limit") for outcome in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
