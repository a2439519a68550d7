"""Settings in the words of other engines."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_specdec import SpeculationError
from hf_specdec.cli import app
from hf_specdec.serve.engines import ENGINES, translated
from hf_specdec.tools.loading.drafters import config_of

ROOT = Path(__file__).parents[2]


def said(spec: str, engine: str, draft: str | None = None) -> str:
    config, own = config_of(spec)
    return translated(config, engine, draft or own)


def test_what_is_copied() -> None:
    spec = "prompt_lookup:max_draft_tokens=10,min_match=2,max_match=5"
    assert json.loads(said(spec, "vllm")) == {
        "method": "ngram",
        "num_speculative_tokens": 10,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    sglang = said(spec, "sglang")
    assert "NGRAM --speculative-num-draft-tokens 11" in sglang and "max-trie-depth 15" in sglang
    suffix = json.loads(said("suffix:max_draft_tokens=8,max_match=16,tokens_per_match=3,min_probability=0.3", "vllm"))
    assert suffix["method"] == "suffix" and suffix["suffix_decoding_max_tree_depth"] == 24
    assert suffix["suffix_decoding_max_spec_factor"] == 3.0 and suffix["suffix_decoding_min_token_prob"] == 0.3


@pytest.mark.parametrize("window", [5, "auto"])
def test_what_is_drafted_by_a_model(window: int | str) -> None:
    settings = json.loads(said(f"draft_model:num_draft_tokens={window}", "vllm", "org/draft"))
    gamma = settings["num_speculative_tokens"]
    assert settings["model"] == "org/draft" and (gamma == window or window == "auto")
    flags = said(f"draft_model:num_draft_tokens={window}", "sglang", "org/draft").split()
    flag = dict(zip(flags[::2], flags[1::2], strict=True))
    assert flag["--speculative-draft-model-path"] == "org/draft" and flag["--speculative-num-steps"] == str(gamma)
    assert flag["--speculative-num-draft-tokens"] == str(gamma + 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("spec", "draft", "message"),
    [
        ("draft_model", None, "--draft"),
        ("hybrid", "org/draft", "no equivalent"),
        (str(ROOT / "hub_configs/streaming"), None, "no equivalent"),
        (str(ROOT / "hub_configs/draft_model"), None, "cut_llama"),
        ("nothing", None, "not a folder"),
        ("suffix:max_match=0", None, "max_match"),
    ],
)
def test_what_no_engine_can_be_told(engine: str, spec: str, draft: str | None, message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        said(spec, engine, draft)


def test_the_command() -> None:
    run = CliRunner().invoke(app, ["translate", str(ROOT / "hub_configs/suffix"), "--to", "vllm"])
    assert run.exit_code == 0 and json.loads(run.stdout)["method"] == "suffix"
    run = CliRunner().invoke(app, ["translate", "suffix", "--to", "tgi"])
    assert run.exit_code == 2 and "vllm, sglang" in run.output
