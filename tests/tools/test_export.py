"""What other engines load: a plain model folder, their own options, and a refusal that says what to export instead."""

import json
import shlex
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from eagle_heads import CONFIGS, eagle, folder_of
from hub_server import TOKEN
from hub_tools import drafter_of, hub_of_our_own, push_model, tiny_model
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_specdec import DraftModelDrafter, EagleDrafter, HybridDrafter, SpeculationError
from hf_specdec.cli import app
from hf_specdec.drafters.draft_model.cut import CutLlamaForCausalLM
from hf_specdec.hub.registry import drafter_types
from hf_specdec.serve.engines import ENGINES
from hf_specdec.serve.export import export_drafter
from hf_specdec.train.draft.cutting import cut

ROOT = Path(__file__).parents[2]
KNOWN = torch.tensor([0, 1, *range(2, 97, 2)])
UNKNOWN = torch.tensor([token for token in range(models.VOCAB) if token not in KNOWN.tolist()])


def vllm(spec: str, output: Path | None = None, draft: str | None = None) -> tuple[str, dict[str, Any]]:
    """The target that vLLM is told to serve, and its speculative config."""
    program, serve, target, flag, settings = shlex.split(export_drafter(spec, "vllm", output, draft))
    assert (program, serve, flag) == ("vllm", "serve", "--speculative-config")
    return target, json.loads(settings)


def sglang(spec: str, output: Path | None = None, draft: str | None = None) -> dict[str, str]:
    """SGLang's options."""
    python, dash_m, module, *flags = shlex.split(export_drafter(spec, "sglang", output, draft))
    assert (python, dash_m, module) == ("python", "-m", "sglang.launch_server")
    return dict(zip(flags[::2], flags[1::2], strict=True))


def cut_draft(**changes: Any) -> CutLlamaForCausalLM:
    target = models.from_config(LlamaConfig(**models.SIZES | {"num_hidden_layers": 3} | changes))
    return cut(target, [0, 2], KNOWN).eval()


# ------------------------------------------------------------------ draft models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_cut_draft_is_a_llama_with_the_same_logits(changes: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    DraftModelDrafter(cut_draft(**changes).to(dtype)).save_pretrained(tmp_path / "drafter")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter" / "draft_model")
    assert type(draft) is CutLlamaForCausalLM
    _, settings = vllm(str(tmp_path / "drafter"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(settings["model"])
    assert type(plain) is LlamaForCausalLM and plain.config.model_type == "llama" and plain.dtype == dtype
    assert plain.config.vocab_size == models.VOCAB and plain.config.architectures == ["LlamaForCausalLM"]
    ids = models.prompts([40, 40])["input_ids"]
    assert torch.isin(ids, UNKNOWN).any()  # what is read may be unknown, too
    with torch.no_grad():
        expected, found = draft(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.allclose(found[..., KNOWN], expected[..., KNOWN], atol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert torch.equal(plain.generate(ids, max_new_tokens=12), draft.generate(ids, max_new_tokens=12))


def test_no_hidden_state_makes_an_unknown_token_the_likeliest() -> None:
    head = cut_draft().plain().lm_head
    with torch.no_grad():
        logits = head(torch.randn(20_000, head.in_features))
    assert (logits[:, UNKNOWN].amax(-1) < logits[:, KNOWN].amax(-1)).all()


def test_another_draft_is_copied_as_it_is(tmp_path: Path) -> None:
    drafter, draft = ROOT / "tests/pair/draft_model", ROOT / "tests/pair/draft"
    settings = sglang(str(drafter), tmp_path / "out")
    assert settings["--speculative-draft-model-path"] == str(tmp_path / "out")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (draft / name).read_bytes()
    assert sglang(str(drafter))["--speculative-draft-model-path"] == str(draft)  # used where it is


@pytest.mark.parametrize("window", [5, "auto"])
def test_the_window_of_a_draft(window: int | str) -> None:
    target, settings = vllm(f"draft_model:num_draft_tokens={window}", draft="org/draft")
    gamma = settings.pop("num_speculative_tokens")
    assert settings == {"method": "draft_model", "model": "org/draft"} and target == "your/target"
    assert gamma == window or window == "auto"
    flags = sglang(f"draft_model:num_draft_tokens={window}", draft="org/draft")
    assert flags["--speculative-draft-model-path"] == "org/draft" and flags["--speculative-num-steps"] == str(gamma)
    assert flags["--speculative-num-draft-tokens"] == str(gamma + 1)


def test_a_trained_draft_needs_no_drafter(tmp_path: Path) -> None:
    cut_draft().save_pretrained(tmp_path / "trained")
    _, settings = vllm("draft_model", tmp_path / "out", str(tmp_path / "trained"))
    assert type(AutoModelForCausalLM.from_pretrained(settings["model"])) is LlamaForCausalLM


def test_drafts_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repo that an engine can load is named at its commit, and nothing is copied; a cut draft is fetched."""
    with hub_of_our_own(tmp_path, monkeypatch):
        for name, model in (("ordinary", tiny_model(1)), ("cut", cut_draft())):
            push_model(model, f"org/{name}")
            drafter = DraftModelDrafter(AutoModelForCausalLM.from_pretrained(f"org/{name}"))
            drafter.push_to_hub(f"org/{name}-drafter", token=TOKEN, embed_draft_model=False)
        commit = HfApi().model_info("org/ordinary").sha
        _, settings = vllm("org/ordinary-drafter", tmp_path / "out")
        assert (settings["model"], settings["revision"]) == ("org/ordinary", commit)
        assert sglang("org/ordinary-drafter")["--speculative-draft-model-revision"] == commit
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]
        _, settings = vllm("org/cut-drafter", tmp_path / "plain")
        assert "revision" not in settings
        DraftModelDrafter(tiny_model(1)).push_to_hub("org/embedded", token=TOKEN)
        _, embedded = vllm("org/embedded", tmp_path / "copied")
    assert type(AutoModelForCausalLM.from_pretrained(settings["model"])) is LlamaForCausalLM
    weights = AutoModelForCausalLM.from_pretrained(embedded["model"]).state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny_model(1).state_dict().items())


# ------------------------------------------------------------------ settings


def test_lookup_settings_in_the_engines_words() -> None:
    spec = "prompt_lookup:max_draft_tokens=10,min_match=2,max_match=5"
    assert vllm(spec)[1] == {
        "method": "ngram",
        "num_speculative_tokens": 10,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    flags = sglang(spec)
    assert flags["--speculative-algorithm"] == "NGRAM" and flags["--speculative-num-draft-tokens"] == "11"
    assert flags["--speculative-ngram-max-trie-depth"] == "15"


def test_suffix_settings_in_vllms_words() -> None:
    assert vllm("suffix:max_draft_tokens=8,max_match=16,tokens_per_match=3,min_probability=0.3")[1] == {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 3.0,
        "suffix_decoding_min_token_prob": 0.3,
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("spec", ["prompt_lookup", str(ROOT / "hub_configs/suffix"), str(ROOT / "tests/pair/suffix")])
def test_the_folder_says_what_was_printed(engine: str, spec: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["export", spec, "--to", engine, "--output", str(tmp_path / "out")])
    assert run.exit_code == 0
    assert f"```sh\n{run.stdout.strip()}\n```" in (tmp_path / "out" / "README.md").read_text()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]


# ------------------------------------------------------------------ EAGLE-3 heads


def test_a_head_that_no_other_format_holds_is_not_written() -> None:
    with pytest.raises(SpeculationError, match="holds a P-EAGLE head, which is not exported"):
        vllm(str(folder_of("P-EAGLE")))


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "P-EAGLE"])
def test_a_head_is_written_in_the_format_of_both_engines(kind: str, tmp_path: Path) -> None:
    """From a published folder, and from a drafter's."""
    target, drafter = eagle(kind)
    drafter.save_pretrained(tmp_path / "drafter", target=target)
    for number, spec in enumerate((str(folder_of(kind)), str(tmp_path / "drafter"))):
        out = tmp_path / f"out{number}"
        _, settings = vllm(spec, out)
        gamma = 4 if number == 0 else 3
        assert settings == {"method": "eagle3", "model": str(out), "num_speculative_tokens": gamma}
        loaded = EagleDrafter.load_model(out)
        assert all(torch.equal(loaded.state_dict()[n], t) for n, t in drafter.draft_model.state_dict().items())
        names = set(load_file(out / "model.safetensors"))
        assert {"midlayer.hidden_norm.weight", "fc.weight", "d2t", "t2d"} <= names
    assert sglang(str(tmp_path / "drafter"))["--speculative-algorithm"] == "EAGLE3"
    assert sglang(str(tmp_path / "drafter"))["--speculative-draft-model-path"] == str(tmp_path / "drafter/draft_model")


def test_sglang_does_not_load_the_format_of_speculators() -> None:
    spec = str(folder_of("speculators"))
    assert vllm(spec)[1]["model"] == spec
    with pytest.raises(SpeculationError, match="not in the format of sglang; name a new folder"):
        sglang(spec)
    with pytest.raises(SpeculationError, match="names no head"):
        sglang("eagle3")


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [name for name in drafter_types() if name not in ("draft_model", "mtp")])
def test_every_drafter_is_exported_or_refused_with_what_to_export_instead(
    engine: str, name: str, tmp_path: Path
) -> None:
    drafter_of(name).save_pretrained(tmp_path / "drafter")
    if name in ENGINES[engine]:
        assert export_drafter(str(tmp_path / "drafter"), engine, tmp_path / "out")
        return
    with pytest.raises(SpeculationError, match=f"{engine} .* '{name}'.*; export ") as error:
        export_drafter(str(tmp_path / "drafter"), engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if name in ENGINES["vllm"]:  # what the format of speculators has no place for
        assert str(error.value).endswith("export it with --to vllm")
    assert ("--draft FOLDER" in str(error.value)) == (name in ("hybrid", "disco", "pearl"))


def test_what_a_refusal_of_the_hybrid_proposes_works(tmp_path: Path) -> None:
    HybridDrafter(cut_draft()).save_pretrained(tmp_path / "hybrid")
    _, settings = vllm("draft_model", tmp_path / "out", str(tmp_path / "hybrid" / "draft_model"))
    assert settings["method"] == "draft_model" and settings["model"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draft_model", "--to", "vllm"], "--draft"),
        (["draft_model", "--to", "vllm", "--draft", "./no/where"], "--draft must be a folder or a Hub repo"),
        ([str(ROOT / "hub_configs/draft_model"), "--to", "vllm"], "--output"),
        (["suffix", "--to", "vllm", "--draft", "org/draft"], "leave it out"),
        (["suffix", "--to", "vlm"], "did you mean 'vllm'"),
        (["suffix", "--to", "speculators"], "export it with --to vllm"),
        (["eagle3", "--to", "speculators"], "names no head"),
        (["suffix", "--to", "vllm", "--output", str(ROOT)], "a new or an empty folder"),
        (["suffix", "--to", "vllm", "--output", str(ROOT / "README.md" / "out")], "cannot write"),
        (["nothing", "--to", "vllm"], "not a folder"),
        (["suffix:max_match=0", "--to", "vllm"], "max_match"),
    ],
)
def test_one_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    run = CliRunner().invoke(app, ["export", *arguments])
    assert run.exit_code == 2 and run.output.startswith("error: ") and message in " ".join(run.output.split())


def test_a_draft_without_safetensors_is_refused(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    with pytest.raises(SpeculationError, match=r"model\.safetensors is missing"):
        export_drafter("draft_model", "vllm", tmp_path / "out", str(tmp_path / "draft"))
    save_file({"weight": torch.zeros(1)}, tmp_path / "draft" / "model.safetensors")
    (tmp_path / "draft" / "model.bin").write_bytes(b"")
    with pytest.raises(SpeculationError, match="pickle"):
        export_drafter("draft_model", "vllm", tmp_path / "out", str(tmp_path / "draft"))
