"""What `make gpu` measures with, tried without a GPU; where there is one, all of it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).parent


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", TESTS / "gpu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    return found


@pytest.mark.real_time
def test_a_target_made_costly_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers and wider MLPs add exactly nothing."""
    subjects = module("subjects", monkeypatch)
    target = AutoModelForCausalLM.from_pretrained(TESTS / "pair" / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TESTS / "pair" / "target", padding_side="left")
    inputs = {name: ids.cpu() for name, ids in tokenizer("def add(a, b):", return_tensors="pt").items()}
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 12, "do_sample": False}
    before = target.generate(**inputs, **options)
    parameters = target.num_parameters()
    subjects.deepen(target, 10)
    subjects.widen(target, 960)
    assert len(target.model.layers) == 10 and target.num_parameters() > 1.3 * parameters
    assert torch.equal(target.generate(**inputs, **options), before)


def timing(method: str, seconds: float, **more: Any) -> dict[str, Any]:
    row = {
        "kind": "timing",
        "size": "8B",
        "rows": 1,
        "temperature": 0.0,
        "method": method,
        "prompt": 0,
        "asked": "code",
    }
    times = {"seconds": seconds, "tokens": 100, "text": [[1, 2]], "beside_seconds": 0.05 * seconds}
    parts = {"target_seconds": 0.7 * seconds, "draft_seconds": 0.0, "rounds": 50, "peak_bytes": 1 << 30, "warned": []}
    return row | times | parts | more


def test_the_report_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of fault is named at its top; a run without one has none."""
    report = module("report", monkeypatch)
    sound = [
        {"kind": "machine", "device_type": "cuda"},
        timing("plain, static cache", 2.0),
        timing("plain, captured", 2.2),
        timing("hybrid, captured", 1.0),
    ]

    def wrong(*rows: dict[str, Any]) -> list[str]:
        lines = [json.dumps(row) for row in (*sound, *rows)]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"kind": "timing", "broken']))
        report.write(tmp_path)
        assert "| hybrid, captured | 10.00 | 2.00 |" in (tmp_path / "report.md").read_text()
        found = json.loads((tmp_path / "report.json").read_text())
        return [*found["wrong"], *found["slow"]]

    assert wrong() == []
    profiled = {"kernels": 9, "busy_seconds": 0.001, "dearest": [["gemm", 3, 1e-4]], "attention": [["flash", 1, 1e-5]]}
    replay = {
        "kind": "replay",
        "size": "8B",
        "model": "target",
        "rows": 1,
        "slots": 256,
        "step": "",
        "seconds_behind": 0,
    }
    round_ = {"kind": "launches", "size": "8B", "calls": 9, "operations": 9, "launches": 9, "copies": 1, "waits": 1}
    faults = {
        "TEST FAILED": {"kind": "test", "test": "test_gpu_text.py::t", "outcome": "failed", "seconds": 1, "why": "x"},
        "STEP FAILED": {"kind": "step", "step": "text", "outcome": "failed", "seconds": 1},
        "STEP BROKE OFF": {"kind": "begun", "step": "PEARL"},
        "COULD NOT BE TIMED": {"kind": "failed", "size": "8B", "why": "out of memory"},
        "WRONG TEXT": timing("suffix", 1.0, kind="parted", position=3, near_tie=False),
        "A DRAFTER FAILED": timing("suffix", 1.0, notes=["SuffixDrafter was dropped: it raised"]),
        "costs time": timing("suffix", 2.5),
        "none of ours gains": [
            timing(name, seconds, rows=8) for name, seconds in (("plain, static cache", 2.0), ("suffix", 3.0))
        ],
        "PEARL does not overlap": [
            timing(name, seconds, size="8B, draft 0.5B")
            for name, seconds in (("plain, captured", 2.0), ("draft_model, captured", 1.2), ("pearl, captured", 1.3))
        ],
        "time beside": timing("suffix", 1.0, beside_seconds=0.6),
        "wide forwards": [
            replay | profiled | {"width": width, "seconds": seconds} for width, seconds in ((1, 0.005), (16, 0.02))
        ],
        "the device idles": round_ | profiled | {"method": "hybrid, captured", "seconds": 0.01},
        "memory": [
            {"kind": "memory", "size": "8B", "rows": 8, "method": name, "most_bytes": most << 30, "held_bytes": 0}
            for name, most in (("plain, static cache", 1), ("hybrid, captured", 2))
        ],
    }  # fmt: skip
    for beginning, row in faults.items():
        found = wrong(*(row if isinstance(row, list) else [row]))
        assert any(line.startswith(beginning) for line in found), (beginning, found)


def test_its_modules_find_what_they_ask_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "steps", "timings", "profiles"):
        module(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.fresh_python  # its processes have sessions of their own
@pytest.mark.real_time
def test_every_step_is_timed_in_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was compiled comes along."""
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "kernel").touch()
    packed = shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path / "known")
    for name, value in {"DEVICE": "cpu", "STEPS": "timings", "BUDGET": "300", "INDUCTOR": packed, "GGUF": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OUT", str(tmp_path))
    run = module("run", monkeypatch)
    monkeypatch.setattr(run, "COMPILED", tmp_path / "compiled")
    status, report = run.main(), json.loads((tmp_path / "report.json").read_text())
    assert not report["wrong"] and "skipped" not in report, (report["wrong"], (tmp_path / "log.txt").read_text())
    assert status == 0 and len(report["step"]) - 1 == len(report["begun"]) == 10
    assert {row["width"] for row in report["replay"]} >= {1, 16, 32, 64, "chain"}
    with tarfile.open(tmp_path / "inductor.tar.gz") as brought:
        assert "./kernel" in brought.getnames()


@pytest.mark.skipif(not torch.cuda.is_available() or "DEVICE" in os.environ, reason="there is no GPU")
def test_all_of_it_passes_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "run"]
    env = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(TESTS / "gpu")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
