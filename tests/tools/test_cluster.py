"""The scripts of docs/guides/batches.md: with workers killed in the middle, every prompt has its line, in order."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from printed import ROOT, fences
from processes import children, free_port, until

from hf_specdec.tools.loading.models import TargetSettings, load_model, load_tokenizer

pytestmark = pytest.mark.real_time
TARGET = str(ROOT / "tests" / "pair" / "target")
PROMPTS = [f"def f{i}(a, b):\n    return" for i in range(40)]
RAY, ACCELERATE = fences("docs/guides/batches.md", "py")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}


class Run:
    """A folder with a script of the page and prompts, and the answers of whoever ran it there."""

    def __init__(self, folder: Path, script: str, launcher: list[str]) -> None:
        self.path, self.output = folder / "script.py", folder / "answers.jsonl"
        changes = {
            '"smollm2"': f'"{TARGET}", dtype="float32"',
            "PromptLookupDrafter()": "PromptLookupDrafter(), max_rows=2",
        }
        for printed, small in changes.items():
            assert script.count(printed) == 1
            script = script.replace(printed, small)
        self.path.write_text(script)  # answers come few at a time, and so some are missing when a worker is killed
        self.source = folder / "prompts.jsonl"
        self.source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        self.launcher = launcher

    def held(self) -> list[str]:
        """The whole lines that there are."""
        parts = sorted(self.output.parent.glob("answers.jsonl.part*"))
        return [line for part in parts for line in part.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @contextmanager
    def started(self, *options: str) -> Iterator[subprocess.Popen]:
        """The script, and nothing that it has started is left behind."""
        command = [*self.launcher, *options, str(self.path), str(self.source), str(self.output)]
        environment = os.environ | QUIET | {"PYTHONPATH": str(ROOT)}
        with open(self.path.with_name("log"), "w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.path.parent
            )
        try:
            yield process
        finally:
            for one in [process.pid, *descendants(process.pid)]:
                kill(one)
            process.wait()

    def reaches(self, process: subprocess.Popen, lines: int) -> None:
        """Wait for so many lines, of a script that is still at work."""
        until(lambda: len(self.held()) >= lines or process.poll() is not None, 240)
        assert process.poll() is None and len(self.held()) < len(PROMPTS), self.log()

    def log(self) -> str:
        return self.path.with_name("log").read_text()[-5000:]

    def check(self, kept: list[str]) -> None:
        """All is there, in order, and right; what was held once has not changed."""
        lines = self.output.read_text().splitlines(keepends=True)
        assert [json.loads(line)["prompt"] for line in lines] == PROMPTS
        assert [json.loads(line)["text"] for line in lines] == plain()
        assert all(json.loads(line)["stats"]["emitted_tokens"] == 64 for line in lines)
        assert kept and set(kept) <= set(lines)
        assert not self.held()


def descendants(process: int) -> Iterator[int]:
    for child in children(process):
        yield child
        yield from descendants(child)


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def is_actor(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::MapWorker")
    except OSError:
        return False


_plain: list[str] = []


def plain() -> list[str]:
    if not _plain:
        source = TargetSettings(target=TARGET, dtype="float32")
        model, tokenizer = load_model(source), load_tokenizer(source)
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            _plain.append(tokenizer.decode(output, skip_special_tokens=True))
    return _plain


@pytest.mark.slow
def test_ray_data_goes_on_when_the_script_and_a_worker_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[cluster]'")
    run = Run(tmp_path, RAY, [sys.executable])
    with run.started() as script:  # and is killed with all that it has started
        run.reaches(script, 1)
    first = run.held()
    assert first and not run.output.exists()
    with run.started() as script:
        run.reaches(script, len(first) + 1)
        actors = [one for one in descendants(script.pid) if is_actor(one)]
        assert len(actors) == 2
        kill(actors[0])
        second = run.held()
        assert script.wait(300) == 0, run.log()
    run.check(second)
    assert set(first) <= set(second)


@pytest.mark.slow
def test_accelerate_goes_on_when_a_process_is_killed(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    run = Run(tmp_path, ACCELERATE, launch)
    with run.started(f"--main_process_port={free_port()}") as launcher:
        run.reaches(launcher, 1)
        kill(children(launcher.pid)[-1])
        held = run.held()
        assert launcher.wait(300) != 0
    assert not run.output.exists()
    with run.started(f"--main_process_port={free_port()}") as launcher:
        assert launcher.wait(300) == 0, run.log()
    run.check(held)
