"""The parts of the benchmark: prompts in, costs set, forwards counted, results kept whatever happens."""

import errno
import json
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM
from typer.testing import CliRunner

from hf_specdec.bench import results as results_module
from hf_specdec.bench.audit import audit, first_difference
from hf_specdec.bench.bare import bare_seconds, time_bare_forwards
from hf_specdec.bench.measure import Bench
from hf_specdec.bench.meter import Forward, Meter, metered
from hf_specdec.bench.pacing import paced
from hf_specdec.bench.padding import pad_mlps
from hf_specdec.bench.plan import Settings, plan
from hf_specdec.bench.prompts import MAX_LINE_BYTES, load_prompts
from hf_specdec.bench.results import Results
from hf_specdec.bench.specs import BASELINES, build_method, parse_options
from hf_specdec.bench.summary import summarize
from hf_specdec.bench.synthetic import synthetic_acceptance
from hf_specdec.cli import app
from hf_specdec.errors import SpeculationError

DEMO = Path(__file__).parents[1] / "hf_specdec" / "demo"
PROMPT = torch.tensor([[5, 9, 3, 17, 4, 8]])
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(seed: int, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": layers}, intermediate_size=48, eos_token_id=None)
    return _varied(LlamaForCausalLM(config))


def _varied(model):
    """Weights large enough that greedy text does not repeat one token."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def plain(model, tokens: int = 24) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=tokens, do_sample=False)[0].tolist()


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
    assert load_prompts(path) == [prompt]  # the second is the same


def test_plain_text_has_a_prompt_per_line_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo\nthree\n")
    assert load_prompts(path) == ["one", "two", "three"]
    assert load_prompts(path, limit=2) == ["one", "two"]


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


# ------------------------------------------------------------------ cost-padding, pacing, synthetic acceptance


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("width", [48, 100])
def test_cost_padding_leaves_the_tokens_as_they_are(family: str, width: int) -> None:
    torch.manual_seed(0)
    model = {
        "llama": lambda: llama(0),
        "gpt2": lambda: _varied(GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_inner=48))),
        "opt": lambda: _varied(OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32))),
    }[family]()
    tokens, logits = plain(model), model(PROMPT).logits
    before = sum(p.numel() for p in model.parameters())
    assert pad_mlps(model, width) == 2
    assert plain(model) == tokens
    torch.testing.assert_close(model(PROMPT).logits, logits)
    assert (sum(p.numel() for p in model.parameters()) > before) == (width > 48)


@pytest.mark.parametrize("padded", ["target", "draft"])
def test_cost_padding_leaves_speculation_as_it_is(padded: str) -> None:
    models = {"target": llama(0), "draft": llama(1, layers=1)}

    def run() -> tuple[list[int], int]:
        with metered(models["target"], models["draft"]) as meter:
            output = models["target"].generate(PROMPT, max_new_tokens=24, assistant_model=models["draft"])
        return output[0].tolist(), len(meter.forwards)

    before = run()
    pad_mlps(models[padded], 200)
    assert run() == before


def test_padding_names_what_it_cannot_do() -> None:
    with pytest.raises(SpeculationError, match="larger width"):
        pad_mlps(llama(0), 10)
    with pytest.raises(SpeculationError, match="no MLP with layers named"):
        pad_mlps(torch.nn.Sequential(torch.nn.Linear(2, 2)), 10)


def test_pacing_takes_no_processor_time_and_changes_nothing() -> None:
    model = llama(0)
    tokens = plain(model, 8)
    with paced(model, 30):
        cpu, wall = time.process_time(), time.perf_counter()
        assert plain(model, 8) == tokens
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert wall >= 8 * 0.030  # never less than was set
    assert "forward" not in vars(model)
    with pytest.raises(SpeculationError, match="above 0"), paced(model, 0):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [5.0, 20.0])
def test_pace_is_within_2_percent(milliseconds: float) -> None:
    model = llama(0)
    with paced(model, milliseconds), metered(model) as meter:
        plain(model, 50)
    seconds = sorted(forward.seconds for forward in meter.forwards)
    assert seconds[len(seconds) // 2] == pytest.approx(milliseconds / 1000, rel=0.02)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_synthetic_acceptance_sets_what_both_loops_accept(acceptance: float) -> None:
    target, draft = llama(0), llama(1, layers=1)
    tokens = plain(target, 200)
    for spec in ("hf-assisted:num_assistant_tokens=4", "draft_model:num_draft_tokens=4"):
        method = build_method(spec, draft)
        with method.prepared(), synthetic_acceptance(draft, tokens, acceptance), metered(target, draft) as meter:
            output = target.generate(PROMPT, max_new_tokens=200, do_sample=False, **method.kwargs)
        assert output[0].tolist() == tokens
        rounds = meter.accepted_per_round(PROMPT.shape[1], 200)
        tested = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
        assert sum(accepted for _, accepted in rounds) / tested == pytest.approx(acceptance, abs=0.12), spec
    with pytest.raises(SpeculationError, match=r"\[0, 1\]"), synthetic_acceptance(draft, tokens, 1.5):
        pass


# ------------------------------------------------------------------ forwards


def test_meter_sees_every_forward_and_what_was_accepted() -> None:
    target, draft = llama(0), llama(0, layers=1)
    with metered(target) as meter:
        plain(target, 10)
    assert [(f.role, f.width, f.context) for f in meter.forwards] == [("target", 6, 0)] + [
        ("target", 1, 6 + i) for i in range(9)
    ]
    assert meter.accepted_per_round(6, 10) == [(0, 0)] * 10
    assert meter.decode_seconds + meter.prefill_seconds == meter.seconds
    for spec in ("hf-assisted:num_assistant_tokens=3", "draft_model:num_draft_tokens=3"):
        method = build_method(spec, draft)
        for _ in range(2):  # a first call may try out what the models can do
            with method.prepared(), metered(target, draft) as meter:
                target.generate(PROMPT, max_new_tokens=20, do_sample=False, **method.kwargs)
        rounds = meter.accepted_per_round(6, 20)
        assert sum(accepted + 1 for _, accepted in rounds) == 20, spec
        assert all(0 <= accepted <= drafted <= 3 for drafted, accepted in rounds)
        stats = method.drafter.last_stats if method.drafter else None
        assert stats is None or stats.accepted_tokens == sum(accepted for _, accepted in rounds)


def test_a_metered_model_can_be_sent_to_another_process() -> None:
    model = llama(0)
    with metered(model):
        copied = pickle.loads(pickle.dumps(model))
    assert "forward" not in vars(model)
    torch.testing.assert_close(copied(PROMPT).logits, model(PROMPT).logits)


def test_bare_forwards_cover_every_kind_that_was_made() -> None:
    target, draft = llama(0), llama(1, layers=1)
    with metered(target, draft) as meter:
        output = target.generate(PROMPT, max_new_tokens=12, assistant_model=draft)
    table = time_bare_forwards({"target": target, "draft": draft}, meter.forwards, output)
    expected = sum(table[f.role, f.rows, f.width] for f in meter.forwards if f.context)
    assert bare_seconds(meter.forwards, table) == expected > 0
    assert {("target", 1, 1), ("draft", 1, 1)} <= set(table)


def test_rounds_of_a_loop_that_drafts_before_the_prefill() -> None:
    made = [Forward("target", 1, 8, 0, 0.0), Forward("target", 1, 3, 7, 0.0), Forward("target", 1, 3, 10, 0.0)]
    # A prompt of 6 with 2 drafted tokens, of which 1 was right; then 2 of 2; then 0 of 2.
    assert Meter(forwards=made).accepted_per_round(6, 6) == [(2, 1), (2, 2), (2, 0)]


# ------------------------------------------------------------------ methods


def test_specs_are_read_and_refused() -> None:
    assert parse_options("draft_model:num_draft_tokens=5,mode=fast") == (
        "draft_model",
        {"num_draft_tokens": 5, "mode": "fast"},
    )
    draft = llama(1)
    assert build_method("draft_model:num_draft_tokens=3", draft).drafter.config.num_draft_tokens == 3
    assert [build_method(name, draft).name for name in BASELINES] == list(BASELINES)
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
    draft = llama(1)
    before = draft.generation_config.to_dict()
    with build_method("hf-assisted:num_assistant_tokens=3", draft).prepared():
        assert draft.generation_config.num_assistant_tokens == 3
    assert draft.generation_config.to_dict() == before


def test_audit_finds_the_first_difference_and_its_gap() -> None:
    model = llama(0)
    mine = plain(model, 12)[PROMPT.shape[1] :]
    assert audit(model, PROMPT, mine, mine) is None
    logits = model(torch.tensor([PROMPT[0].tolist() + mine[:4]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = audit(model, PROMPT, mine, [*mine[:4], second, 1, 2])
    assert found is not None and (found.position, found.plain_token, found.other_token) == (4, mine[4], second)
    assert found.gap == pytest.approx((logits[mine[4]] - logits[second]).item(), abs=1e-3)
    assert found.top_two and not found.near_tie
    assert first_difference([1, 2], [1, 2, 3]) == 2
    shorter = audit(model, PROMPT, mine, mine[:5])
    assert shorter is not None and shorter.gap is None and shorter.other_token is None


def test_a_drafter_that_remembers_meets_each_prompt_once(tmp_path: Path) -> None:
    bench = Bench(_settings(tmp_path, drafters=["suffix"], repeats=2))
    unit = plan(bench.settings)[0]
    bench._warm_up(unit)
    first, second = [m for m in bench.measure(unit) if m.method == "suffix"]
    assert first.accepted_per_position == second.accepted_per_position
    stores = [methods[-1].drafter.store for methods in bench.passes]
    assert stores[0] is not stores[1]


def _settings(folder: Path, **more) -> Settings:
    (folder / "p.txt").write_text("def add(a, b):\n")
    small = {"dtype": "float32", "max_new_tokens": 8, "baselines": ["plain"]}
    return Settings(str(DEMO / "target"), [str(folder / "p.txt")], draft=str(DEMO / "draft"), **small | more)


# ------------------------------------------------------------------ runs that end early


def bench_arguments(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("def add(a, b):\nQuestion: How many?\nimport os\n")
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--dtype", "float32"]
    size = ["--max-new-tokens", "6", "--repeats", "1", "--baseline", "hf-assisted", "--threads", "1"]
    return ["bench", *models, *size, "--prompts", str(prompts), "--json", str(folder / "out.json"), *more]


def test_bench_writes_measurements_and_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, bench_arguments(tmp_path, "--drafter", "draft_model:num_draft_tokens=3"))
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["schema"] == 1
    assert {"versions", "git_revision", "command", "device", "threads", "settings"} <= set(content["provenance"])
    assert [run["name"] for run in content["runs"]] == ["plain", "hf-assisted", "draft_model:num_draft_tokens=3"]
    assert all(run["identical"] and run["tokens"] == 18 for run in content["runs"])
    assert len(content["measurements"]) == 9
    again = CliRunner().invoke(app, bench_arguments(tmp_path))
    assert again.exit_code == 2 and "--resume" in again.output


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
        (["--batch-size", "0"], "batch_size"),
        (["--dtype", "int7"], "dtype"),
        (["--synthetic-acceptance", "0.5", "--temperature", "1"], "synthetic_acceptance"),
        (["--drafter", "no_such"], "no_such"),
        (["--limit", "0"], "limit"),
        (["--max-new-tokens", "100000"], "context"),
    ],
)
def test_bad_arguments_end_with_a_message(tmp_path: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, bench_arguments(tmp_path, *more))
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_damaged_result_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.json").write_text(content)
    with pytest.raises(SpeculationError, match=r"out\.json"):
        Results.load(tmp_path / "out.json")


def test_plan_goes_through_all_cells(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\nb\nc\n")
    units = plan(Settings("t", [str(path)], batch_sizes=(1, 2), temperatures=(0.0, 1.0)))
    assert [unit.key for unit in units if unit.temperature == 0] == [
        ("p", 0, 1, 0.0),
        ("p", 1, 1, 0.0),
        ("p", 2, 1, 0.0),
        ("p", 0, 2, 0.0),
        ("p", 1, 2, 0.0),
    ]
    with pytest.raises(SpeculationError, match="different names"):
        plan(Settings("t", [str(path), str(path)]))


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
