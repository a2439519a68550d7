"""The demo's picture tells the truth: without what was rejected it is the text, and every drafted token is in it."""

import platform

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_specdec.bench.methods import PLAIN, Method
from hf_specdec.cli import app
from hf_specdec.demo import GenerateSettings, run, run_generate
from hf_specdec.demo.colour import _pieces, painted
from hf_specdec.demo.compare import compare
from hf_specdec.demo.prompts import PROMPTS
from hf_specdec.demo.run import PAIR
from hf_specdec.instruments.audit import first_difference
from hf_specdec.instruments.recording import RecordingDrafter
from hf_specdec.loading.devices import cpu_capabilities, cpu_dtype
from hf_specdec.loading.drafters import load_drafter
from hf_specdec.loading.models import ModelSource, load_model, load_tokenizer


@pytest.fixture(scope="module")
def pair():
    return [load_model(ModelSource(str(PAIR / name), "float32")) for name in ("target", "draft")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSource(str(PAIR / "target")))


@pytest.mark.parametrize("spec", ["draft_model:num_draft_tokens=5", "draft_model", "prompt_lookup"])
@pytest.mark.parametrize("name", list(PROMPTS))
def test_the_picture_without_rejected_tokens_is_the_text(pair, tokenizer, name, spec):
    recorder = RecordingDrafter(load_drafter(spec, pair[1]))
    inputs = tokenizer(PROMPTS[name], return_tensors="pt")
    methods = [Method(PLAIN), Method("ours", {"assistant_model": recorder}, None, recorder)]
    plain, ours = compare(
        pair[0],
        methods,
        {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])},
        turns=1,
        max_new_tokens=24,
        do_sample=False,
    )
    assert first_difference(plain.tokens, ours.tokens) is None
    assert plain.mean_acceptance_length == 1
    pieces = list(_pieces(tokenizer, ours.tokens, recorder.rounds))
    assert "".join(text for kind, text in pieces if kind != "rejected") == tokenizer.decode(ours.tokens)
    accepted = sum(r.accepted for r in recorder.rounds)
    assert accepted == recorder.last_stats.accepted_tokens
    colourful = painted(
        Console(force_terminal=True, color_system="truecolor"), tokenizer, "", ours.tokens, recorder.rounds
    )
    assert colourful.plain == "".join(text for _, text in pieces)


def test_generate_continues_a_prompt_with_any_pair(capsys):
    pair = {"target": str(PAIR / "target"), "draft": str(PAIR / "draft")}
    run_generate(GenerateSettings(prompt="def add(a, b):", **pair, max_new_tokens=8))
    printed = capsys.readouterr().out
    assert "def add(a, b):" in printed
    assert "mean acceptance length" in printed


AVX512 = {"avx2": True, "avx512_f": True, "avx512_bw": True, "avx512_vnni": True}


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({}, "float32"),  # an older torch, which does not say
        ({"avx2": True, "avx512_f": False, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        (AVX512 | {"avx512_bf16": False, "amx_bf16": False}, "float32"),  # Skylake to Ice Lake
        (AVX512 | {"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        (AVX512 | {"avx512_bf16": True, "amx_bf16": True}, "bfloat16"),
        ({"avx2": True, "amx_tile": True, "amx_int8": True, "amx_bf16": False}, "float32"),
        ({"avx2": True, "amx_tile": True, "amx_bf16": True}, "bfloat16"),
    ],
)
def test_the_demo_takes_bfloat16_only_where_the_cpu_computes_in_it(capabilities, dtype):
    assert cpu_dtype(capabilities) == dtype


def test_the_demo_asks_torch_for_what_the_cpu_can_do(monkeypatch):
    if hasattr(torch.cpu, "get_capabilities"):
        assert {"avx512_bf16", "amx_bf16"} <= set(cpu_capabilities()) or platform.machine() not in ("x86_64", "AMD64")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert cpu_capabilities() == {}


@pytest.mark.parametrize(("worthwhile", "said"), [(0.0, False), (1e9, True)])
def test_the_demo_says_what_stands_in_the_way_of_a_speed_up(monkeypatch, capsys, worthwhile, said):
    for name, value in {"WORTHWHILE": worthwhile, "MLP": 800, "TURNS": 1, "NEW_TOKENS": 8}.items():
        monkeypatch.setattr(run, name, value)
    run.run_demo()
    printed = capsys.readouterr().out
    assert ("On this machine a verification of 6 tokens" in printed) == said
    assert cpu_dtype(cpu_capabilities()) in printed and "speed-up" in printed


def test_generate_takes_what_bench_takes():
    arguments = ["generate", "--target", str(PAIR / "target"), "--prompt", "def add(a, b):", "--max-new-tokens", "8"]
    more = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--temperature", "1"]
    said = {}
    for seed in ("1", "2", "1 "):
        result = CliRunner().invoke(app, [*arguments, *more, "--seed", seed.strip()])
        assert result.exit_code == 0, result.output
        said[seed] = result.output.partition("tokens/s")[0]
    assert said["1"] == said["1 "] != said["2"]
    result = CliRunner().invoke(app, [*arguments, "--dtype", "float33"])
    assert result.exit_code == 2 and "dtype must be" in result.output


def test_generate_samples_without_a_draft_model(capsys):
    target = str(PAIR / "target")
    run_generate(GenerateSettings(prompt="def add(a, b):", target=target, max_new_tokens=8, temperature=1.0))
    assert "sampled" in capsys.readouterr().out
