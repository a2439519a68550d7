"""What `make gpu` measures with, tried without a GPU; where there is one, all of it."""

import importlib.util
import json
import os
import subprocess
import sys
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
    row = {"kind": "timing", "size": "8B", "rows": 1, "temperature": 0.0, "method": method, "prompt": 0, "tokens": 100}
    times = {"seconds": seconds, "plain_seconds": 2.0, "plain_tokens": 100, "beside_seconds": 0.05 * seconds}
    parts = {"target_seconds": 0.7 * seconds, "draft_seconds": 0.0, "rounds": 50}
    rest = {"peak_bytes": 1 << 30, "same_rows": 1, "warned": []}
    return row | times | parts | rest | more


def test_the_report_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of fault is named at its top; a run without one has none."""
    report = module("report", monkeypatch)
    sound = [
        {"kind": "machine", "device_type": "cuda"},
        timing("plain", 2.0),
        timing("hybrid", 1.0),
        timing("hf-assisted", 1.5),
    ]

    def wrong(*rows: dict[str, Any]) -> list[str]:
        lines = [json.dumps(row) for row in (*sound, *rows)]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"kind": "timing", "broken']))
        report.write(tmp_path)
        assert "| hybrid |" in (tmp_path / "report.md").read_text()
        found = json.loads((tmp_path / "report.json").read_text())
        return [*found["wrong"], *found["slow"]]

    assert wrong() == []
    parted = {"position": 3, "near_tie": False}
    faults = {
        "TEST FAILED": {"kind": "test", "test": "test_gpu_text.py::t", "outcome": "failed", "seconds": 1, "why": "x"},
        "STEP": {"kind": "step", "step": "text", "outcome": "failed", "seconds": 1},
        "COULD NOT BE TIMED": {"kind": "failed", "size": "8B", "why": "out of memory"},
        "WRONG TEXT": timing("suffix", 1.0, same_rows=0, difference=parted),
        "A DRAFTER FAILED": timing("suffix", 1.0, notes=["SuffixDrafter was dropped: it raised"]),
        "costs time": timing("suffix", 2.5),
        "others are faster": timing("plain, static cache", 0.5),
        "PEARL does not overlap": [
            timing(name, seconds, size="8B, draft 0.5B")
            for name, seconds in (("plain", 2.0), ("draft_model", 1.2), ("pearl:worker=thread", 1.3))
        ],
        "time beside": timing("suffix", 1.0, beside_seconds=0.6),
        "wide forwards": [
            {"kind": "width", "size": "8B", "rows": 1, "width": width, "launched_seconds": 0.001, "seconds": seconds,
             "ours_seconds": seconds} for width, seconds in ((1, 0.005), (16, 0.02))
        ],
        "memory": {"kind": "memory", "drafter": "hybrid", "rows": 1, "plain_bytes": 1 << 30, "ours_bytes": 1 << 31,
                   "left_bytes": 0},
    }  # fmt: skip
    for beginning, row in faults.items():
        found = wrong(*(row if isinstance(row, list) else [row]))
        assert any(line.startswith(beginning) for line in found), (beginning, found)


@pytest.mark.skipif(not torch.cuda.is_available() or "DEVICE" in os.environ, reason="there is no GPU")
def test_all_of_it_passes_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "gpu" / "run.py")]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
