"""The benchmark: prompts in, methods by name, results kept whatever happens."""

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama
from typer.testing import CliRunner

from hf_specdec import Drafter
from hf_specdec.cli import app
from hf_specdec.errors import SpeculationError
from hf_specdec.tools.bench import results as results_module
from hf_specdec.tools.bench import summary
from hf_specdec.tools.bench.best import mean_speedups
from hf_specdec.tools.bench.measure import Bench
from hf_specdec.tools.bench.methods import USUAL, build_method
from hf_specdec.tools.bench.plan import Settings, plan
from hf_specdec.tools.bench.results import Results
from hf_specdec.tools.bench.run import run_bench
from hf_specdec.tools.bench.summary import summarize
from hf_specdec.tools.instruments.provenance import provenance
from hf_specdec.tools.loading.drafters import parse_options
from hf_specdec.tools.loading.prompts import Prompt, load_prompts
from hf_specdec.tools.loading.rows import MAX_LINE_BYTES

DEMO = Path(__file__).parents[1] / "pair"

# ------------------------------------------------------------------ prompts

ROWS = {
    "humaneval": {"id": "HumanEval/1", "prompt": "def f():\n", "canonical_solution": "pass"},
    "mbpp": {"id": 11, "text": "Write f.", "code": "...", "test_list": ["assert f(1)"]},
    "gsm8k": {"question": "How many?", "answer": "4"},
    "sql": {"db": "academic", "question": "Which?", "query": "SELECT 1"},
    "e2e": {"mr": "name[X]", "ref": "X is."},
    "dialogsum": {"dialogue": "#Person1#: Hi", "summary": "A greeting."},
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]},
}


@pytest.mark.parametrize(
    ("shape", "prompt"),
    [
        ("humaneval", "def f():\n"),
        ("mbpp", '"""\nWrite f.\nassert f(1)\n"""\n'),
        ("gsm8k", "Question: How many?\nAnswer:"),
        ("sql", "-- Database: academic\n-- Which?\nSELECT"),
        ("e2e", "Meaning: name[X]\nText:"),
        ("dialogsum", "#Person1#: Hi\nSummary:"),
        ("spec_bench", "Compose."),
    ],
)
def test_each_task_has_its_template(tmp_path: Path, shape: str, prompt: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ROWS[shape]) + "\n\n" + json.dumps(ROWS[shape]) + "\n")
    (loaded,) = load_prompts(path)  # the second is the same
    assert loaded.turns[0] == prompt and loaded.chat == (shape == "spec_bench")


def test_plain_text_has_a_prompt_per_line_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo\nthree\n")
    assert load_prompts(path) == [Prompt((text,)) for text in ("one", "two", "three")]
    assert load_prompts(path, limit=2) == [Prompt((text,)) for text in ("one", "two")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json\n", "line 1 is not JSON"),
        (b'{"prompt": "a"}\n[1]\n', "line 2 must be a JSON object"),
        (b'{"answer": "a"}\n', "fit no task"),
        (b'{"prompt": 3}\n', "fit no task"),
        (b'{"prompt": " "}\n', "empty prompt"),
        (b'{"turns": []}\n', "does not fit the spec_bench template"),
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n', f"longer than {MAX_LINE_BYTES:,} bytes"),
    ],
)
def test_malformed_prompt_files_are_named_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpeculationError, match=message):
        load_prompts(path)
    with pytest.raises(SpeculationError, match="cannot read"):
        load_prompts(tmp_path / "absent.jsonl")


@pytest.mark.shared
@pytest.mark.parametrize("path", sorted(Path("../shared/data").glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_shared_file_loads(path: Path) -> None:
    prompts = load_prompts(path)
    assert len(prompts) == len(set(prompts)) > 50


# ------------------------------------------------------------------ methods


def test_specs_are_read_and_refused() -> None:
    assert parse_options("draft_model:num_draft_tokens=5,mode=fast") == (
        "draft_model",
        {"num_draft_tokens": 5, "mode": "fast"},
    )
    draft = llama()
    assert build_method("draft_model:num_draft_tokens=3", draft).drafter.config.num_draft_tokens == 3
    assert [build_method(name, draft).name for name in USUAL] == list(USUAL)
    for spec, message in {
        "draft_model": "needs a draft model",
        "hf-assisted": "needs a draft model",
        "no_such": "known: ",
        "hf-assisted:x=1": "unknown option",
        "draft_model:5": "name:key=value",
    }.items():
        with pytest.raises(SpeculationError, match=message):
            build_method(spec, draft if "unknown" in message or "=" in message else None)


def test_transformers_options_are_taken_back() -> None:
    draft = llama()
    before = draft.generation_config.to_dict()
    with build_method("hf-assisted:num_assistant_tokens=3", draft).prepared():
        assert draft.generation_config.num_assistant_tokens == 3
    assert draft.generation_config.to_dict() == before


def test_a_drafter_that_remembers_meets_each_prompt_once(tmp_path: Path) -> None:
    bench = Bench.load(_settings(tmp_path, drafters=["suffix"], repeats=2))
    unit = plan(bench.settings)[0]
    bench.warm_up(unit, chain(*bench.passes))
    first, second = [m for m in bench.measure(unit) if m.method == "suffix"]
    assert first.stats.accepted_per_position == second.stats.accepted_per_position
    stores = [methods[-1].drafter.store for methods in bench.passes]
    assert stores[0] is not stores[1]


def _settings(folder: Path, **more) -> Settings:
    (folder / "p.txt").write_text("def add(a, b):\n")
    small = {"dtype": "float32", "max_new_tokens": 8, "baselines": ["plain"]}
    models = {"target": str(DEMO / "target"), "draft": str(DEMO / "draft")}
    return Settings(**models, prompts=[str(folder / "p.txt")], **small | more)


# ------------------------------------------------------------------ runs that end early


def bench_arguments(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("def add(a, b):\nQuestion: How many?\nimport os\n")
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--dtype", "float32"]
    size = ["--max-new-tokens", "6", "--repeats", "1", "--baseline", "hf-assisted", "--threads", "1"]
    return ["bench", *models, *size, "--prompts", str(prompts), "--json", str(folder / "out.json"), *more]


def test_a_missing_package_is_missed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, bench_arguments(tmp_path))
    assert result.exit_code == 2 and "pip install" in result.output and not list(tmp_path.glob("*.json"))


def test_bench_writes_measurements_and_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, bench_arguments(tmp_path, "--drafter", "draft_model:num_draft_tokens=3"))
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["schema"] == 2
    assert {"versions", "git_revision", "command", "device", "threads", "settings"} <= set(content["provenance"])
    assert [run["name"] for run in content["runs"]] == ["plain", "hf-assisted", "draft_model:num_draft_tokens=3"]
    assert all(run["identical"] and run["tokens"] == 18 for run in content["runs"])
    assert len(content["measurements"]) == 9
    again = CliRunner().invoke(app, bench_arguments(tmp_path))
    assert again.exit_code == 2 and "--resume" in again.output


@pytest.mark.parametrize(
    ("typed", "script", "command"),
    [
        (["/a/python3.11", "/a/hf-specdec", "bench", "--limit", "2"], "/a/hf-specdec", "hf-specdec bench --limit 2"),
        (["python", "-m", "some.table", "--c", "1"], "/b/some/table.py", "python -m some.table --c 1"),
        (["/a/python", "-u", "/b/my_bench.py", "x"], "/b/my_bench.py", "python -u my_bench.py x"),
    ],
)
def test_a_measurement_names_the_command_that_made_it(monkeypatch, typed: list[str], script: str, command: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", [script, *typed[3:]])
    assert provenance(torch.device("cpu"))["command"] == command


def test_a_stopped_run_keeps_what_it_measured_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = Bench.measure, []

    def interrupted(self, unit, rotation=0):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(unit.index)
        return measure(self, unit, rotation)

    monkeypatch.setattr(Bench, "measure", interrupted)
    result = CliRunner().invoke(app, bench_arguments(tmp_path))
    assert result.exit_code == 128 + signal.SIGINT and "--resume" in result.output
    assert {m.prompt for m in Results.load(tmp_path / "out.json").measurements} == {0}
    monkeypatch.setattr(Bench, "measure", lambda *a, **k: calls.append(a[1].index) or measure(*a, **k))
    assert CliRunner().invoke(app, bench_arguments(tmp_path, "--resume")).exit_code == 0
    assert calls == [0, 1, 2]  # nothing twice
    assert {m.prompt for m in Results.load(tmp_path / "out.json").measurements} == {0, 1, 2}
    changed = CliRunner().invoke(app, bench_arguments(tmp_path, "--resume", "--seed", "3"))
    assert changed.exit_code == 2 and "seed" in changed.output


def test_a_full_disk_leaves_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, real = [], results_module.os.fsync

    def full(descriptor: int) -> None:
        saved.append(descriptor)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(results_module.os, "fsync", full)
    result = CliRunner().invoke(app, bench_arguments(tmp_path))
    assert result.exit_code == 2 and "No space left" in result.output and "still holds" in result.output
    assert {m.prompt for m in Results.load(tmp_path / "out.json").measurements} == {0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "prompts.txt"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "-1", "--temperature", "1"], "top_k must be 0 or more"),
        (["--top-k", "10"], "add --temperature 1"),
        (["--batch-size", "0"], "batch_sizes"),
        (["--dtype", "int7"], "dtype"),
        (["--drafter", "no_such"], "no_such"),
        (["--limit", "0"], "limit"),
        (["--max-new-tokens", "100000"], "context"),
    ],
)
def test_bad_arguments_end_with_a_message(tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, bench_arguments(tmp_path, *more))
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output


def test_drawn_from_one_token_the_text_is_greedy(tmp_path: Path) -> None:
    counts = []
    for more in (["--temperature", "0"], ["--temperature", "1", "--top-k", "1"]):
        folder = tmp_path / more[1]
        folder.mkdir()
        result = CliRunner().invoke(app, bench_arguments(folder, "--drafter", "draft_model:num_draft_tokens=4", *more))
        assert result.exit_code == 0, result.output
        measured = Results.load(folder / "out.json").measurements
        counts.append([(m.stats.emitted_tokens, m.stats.target_calls, m.stats.accepted_tokens) for m in measured])
    assert counts[0] == counts[1] and any(accepted for _, _, accepted in counts[0])


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 1}', '{"schema": 2}'])
def test_damaged_result_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.json").write_text(content)
    with pytest.raises(SpeculationError, match=r"out\.json"):
        Results.load(tmp_path / "out.json")


def test_plan_goes_through_all_cells(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\nb\nc\n")
    units = plan(Settings(target="t", prompts=[str(path)], batch_sizes=(1, 2), temperatures=(0.0, 1.0)))
    assert [unit.key for unit in units if unit.temperature == 0] == [
        ("p", 0, 1, 0.0),
        ("p", 1, 1, 0.0),
        ("p", 2, 1, 0.0),
        ("p", 0, 2, 0.0),
        ("p", 1, 2, 0.0),
    ]
    with pytest.raises(SpeculationError, match="different names"):
        plan(Settings(target="t", prompts=[str(path), str(path)]))


def test_a_killed_run_leaves_a_whole_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", "from hf_specdec.cli import app; app()", *bench_arguments(tmp_path)]
    process = subprocess.Popen(command, cwd=DEMO.parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if out.exists() and Results.load(out).measurements:  # never half a file, whenever it is read
            break
        time.sleep(0.005)
    process.kill()
    process.wait()
    held = Results.load(out)
    assert held.provenance["command"].startswith("python -c from hf_specdec.cli import app; app() bench ")
    assert held.measurements and held.runs == json.loads(json.dumps(summarize(held.measurements)))
    assert CliRunner().invoke(app, bench_arguments(tmp_path, "--resume")).exit_code == 0
    assert {m.prompt for m in Results.load(out).measurements} == {0, 1, 2}


def test_an_ngram_drafter_is_trained_and_measured_by_commands(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n")
    arguments = ["train", "ngram", "--tokenizer", str(DEMO / "target"), "--data", str(tmp_path / "text.txt")]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "drafter"), "--order", "2"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, bench_arguments(tmp_path, "--drafter", str(tmp_path / "drafter"), "--limit", "1"))
    assert result.exit_code == 0, result.output
    assert Results.load(tmp_path / "out.json").runs[-1]["identical"]


# ------------------------------------------------------------------ the best


def run(name: str, speedup: float, dataset: str = "set") -> dict[str, Any]:
    return {"name": name, "speedup": speedup, "dataset": dataset}


def test_the_best_have_the_highest_mean_of_those_measured_on_everything() -> None:
    first = [run("plain", 1.0), run("even", 1.5), run("uneven", 1.9), run("alone", 3.0)]
    second = [run("plain", 1.0, "other"), run("even", 1.5, "other"), run("uneven", 1.0, "other")]
    assert list(mean_speedups(first + second).items()) == [("even", 1.5), ("uneven", pytest.approx(1.45))]
    assert list(mean_speedups(first)) == ["alone", "uneven", "even"]
    assert mean_speedups([run("plain", 1.0)]) == {}


@pytest.fixture
def as_fast_as(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Methods run as they do, and count as so many times as fast as plain decoding."""

    def fast(**speedups: float) -> None:
        def summarized(*args: Any) -> list[dict[str, Any]]:
            return [one | {"speedup": speedups[one["name"].replace("-", "_")]} for one in summarize(*args)]

        monkeypatch.setattr("hf_specdec.tools.bench.measure.summarize", summarized)

    return fast


@pytest.mark.parametrize("best", ["draft_model", "suffix"])
def test_the_best_drafter_is_named_and_its_folder_drafts(tmp_path: Path, as_fast_as, best: str) -> None:
    as_fast_as(**{"plain": 1.0, "draft_model": 1.2, "suffix": 1.1, best: 1.4})
    folder = tmp_path / "mine"
    bench = _settings(tmp_path, drafters=["draft_model", "suffix"], repeats=1)
    assert run_bench(bench, tmp_path / "out.json", write=folder) == 0
    drafter, pair = Drafter.from_pretrained(folder), bench.load()
    assert drafter.config.drafter_type == best and "| 1.40x" in (folder / "README.md").read_text()
    inputs = pair.tokenizer("def add(a, b):\n" * 3, return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = pair.target.generate(**inputs, **options)
    assert torch.equal(plain, pair.target.generate(**inputs, **options, assistant_model=drafter))
    assert drafter.last_stats.drafted_tokens
    with pytest.raises(SpeculationError, match="holds a drafter already"):
        run_bench(bench, tmp_path / "again.json", write=folder)


@pytest.mark.parametrize(
    ("assisted", "suffix", "said"),
    [
        (1.3, 1.1, "best: hf-assisted, 1.30x plain decoding; suffix is in "),
        (1.3, 0.8, "best: hf-assisted, 1.30x plain decoding; it is transformers' own, and no drafter beats"),
        (0.9, 0.8, "nothing beats plain decoding: the best, hf-assisted, runs at 0.90x"),
    ],
)
def test_only_drafters_that_beat_plain_decoding_are_written(
    tmp_path: Path, as_fast_as, assisted: float, suffix: float, said: str
) -> None:
    as_fast_as(plain=1.0, hf_assisted=assisted, suffix=suffix)
    more = ["--drafter", "suffix", "--write", str(tmp_path / "mine")]
    result = CliRunner().invoke(app, bench_arguments(tmp_path, *more))
    assert result.exit_code == 0 and said in result.output
    assert (tmp_path / "mine" / "config.json").exists() == (suffix > 1)
