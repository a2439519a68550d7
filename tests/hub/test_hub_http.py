"""Drafters travel over HTTP, and into new processes: the real client against a Hub of our own (hub_server.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, HubServer
from hub_tools import ON_ANY_TARGET, PROMPT, ROOT, drafter_of, generate, hub_of_our_own, push_model, tiny_model
from huggingface_hub import HfApi, constants
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.cli import app
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import drafter_from_flag, push_folder
from hf_specdec.hub.push import generate_code
from hf_specdec.version import __version__

torch.set_num_threads(1)


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_of_our_own(tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.grid
@pytest.mark.parametrize("name", ON_ANY_TARGET)
def test_push_and_load(name: str, target: PreTrainedModel, hub: HubServer) -> None:
    drafter = drafter_of(name)
    address = drafter.push_to_hub("org/drafter", token=TOKEN, target=target)
    assert address.startswith(f"{hub.url}/org/drafter/commit/")
    loaded = Drafter.from_pretrained("org/drafter")
    assert generate(target, assistant_model=loaded) == generate(target)


def test_revisions(hub: HubServer) -> None:
    for length in (3, 4):
        PromptLookupDrafter(max_match=length).push_to_hub("org/drafter", token=TOKEN, commit_message=f"Match {length}")
    PromptLookupDrafter(max_match=6).push_to_hub("org/drafter", token=TOKEN, revision="long")
    PromptLookupDrafter(max_match=7).push_to_hub("org/drafter", token=TOKEN, create_pr=True)
    commits = {commit.title: commit.commit_id for commit in HfApi().list_repo_commits("org/drafter")}
    found = {
        revision: Drafter.from_pretrained("org/drafter", revision=revision).config.max_match
        for revision in (None, "main", commits["Match 3"], commits["Match 4"], "long", "refs/pr/1")
    }
    assert list(found.values()) == [4, 4, 3, 4, 6, 7]
    with pytest.raises(SpeculationError, match="revision 'none'"):
        Drafter.from_pretrained("org/drafter", revision="none")


def test_generate_py_pins_the_files(hub: HubServer) -> None:
    PromptLookupDrafter(max_match=3).push_to_hub("org/drafter", token=TOKEN)
    commit = hub.commit("org/drafter", "main")
    assert commit is not None
    code = hub.blob(commit["files"]["custom_generate/generate.py"]).read_text()
    written: dict[str, Any] = {}
    exec(code, written)
    assert written["SPECULATION_TYPE"] == "prompt_lookup"
    assert written["DRAFTER"] == {"drafter": "org/drafter", "revision": commit["parent"]}
    pinned = hub.commit("org/drafter", commit["parent"])
    assert pinned is not None and "config.json" in pinned["files"]
    assert "org/drafter" in hub.blob(commit["files"]["README.md"]).read_text()


def test_private_repos_need_the_token(hub: HubServer) -> None:
    drafter = PromptLookupDrafter()
    with pytest.raises(SpeculationError, match="token may write"):
        drafter.push_to_hub("org/drafter", token=False)
    drafter.push_to_hub("org/drafter", token=TOKEN, private=True)
    for token in (None, False, "hf_wrong"):
        with pytest.raises(SpeculationError, match="pass token="):
            Drafter.from_pretrained("org/drafter", token=token)
    assert Drafter.from_pretrained("org/drafter", token=TOKEN).config == drafter.config


def test_offline_from_the_cache(target: PreTrainedModel, hub: HubServer) -> None:
    DraftModelDrafter(tiny_model(1)).push_to_hub("org/drafter", token=TOKEN)
    with pytest.raises(SpeculationError, match="org/drafter"):
        Drafter.from_pretrained("org/drafter", local_files_only=True)
    Drafter.from_pretrained("org/drafter")
    asked = len(hub.requests)
    loaded = Drafter.from_pretrained("org/drafter", local_files_only=True)
    assert len(hub.requests) == asked
    assert generate(target, assistant_model=loaded) == generate(target)


def test_an_interrupted_download_is_resumed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_model(1)
    DraftModelDrafter(draft).push_to_hub("org/drafter", token=TOKEN)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)
    hub.cut_after["draft_model/model.safetensors"] = 1024
    loaded = Drafter.from_pretrained("org/drafter")
    assert "bytes=1024-" in {asked_range for _, _, asked_range in hub.requests}
    for key, weight in draft.state_dict().items():
        assert torch.equal(weight, loaded.draft_model.state_dict()[key])


def test_a_draft_model_in_its_own_repo(target: PreTrainedModel, hub: HubServer, tmp_path: Path) -> None:
    draft = tiny_model(1)
    push_model(draft, "org/draft")
    commit = HfApi().model_info("org/draft").sha
    drafter = DraftModelDrafter(LlamaForCausalLM.from_pretrained("org/draft"))
    drafter.save_pretrained(tmp_path / "drafter", embed_draft_model=False)
    content = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert content["draft_model"] == {"repo_id": "org/draft", "revision": commit}
    push_model(tiny_model(7), "org/draft")  # a later change does not reach the drafter
    (tmp_path / "org" / "draft").mkdir(parents=True)  # nor does a folder of that name
    loaded = Drafter.from_pretrained(tmp_path / "drafter")
    for key, weight in draft.state_dict().items():
        assert torch.equal(weight, loaded.draft_model.state_dict()[key])
    with pytest.raises(SpeculationError, match="embed"):
        DraftModelDrafter(draft).save_pretrained(tmp_path / "other", embed_draft_model=False)


def test_a_model_names_its_drafter(target: PreTrainedModel, hub: HubServer) -> None:
    plain = generate(target)
    DraftModelDrafter(tiny_model(1)).push_to_hub("org/drafter", token=TOKEN, target=target)
    target.generation_config.speculation_type = "draft_model"
    target.generation_config.speculation = {"drafter": "org/drafter"}
    assert generate(target) == plain
    asked = len(hub.requests)
    assert generate(target) == plain
    assert len(hub.requests) == asked  # loaded once
    drafter = drafter_from_flag(target, "draft_model", {"drafter": "org/drafter"})
    assert drafter.last_stats is not None and drafter.last_stats.row_steps > 0
    drafter.last_stats = None
    assert generate(target, speculation_type="none") == plain
    assert drafter.last_stats is None


def test_the_push_command(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = str(ROOT / "hub_configs" / "prompt_lookup")
    done = CliRunner().invoke(app, ["push", folder, "--repo-id", "org/drafter", "--private"])
    assert done.exit_code == 0, done.output
    assert f"{hub.url}/org/drafter/commit/" in done.output
    assert hub.repo("org/drafter")["private"]
    assert Drafter.from_pretrained("org/drafter").config == Drafter.from_pretrained(folder).config


def test_push_takes_only_what_belongs_to_a_drafter(hub: HubServer, tmp_path: Path) -> None:
    PromptLookupDrafter().save_pretrained(tmp_path)
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / "notes.txt").write_text("x")
    push_folder(tmp_path, "org/drafter", token=TOKEN)
    commit = hub.commit("org/drafter", "main")
    assert commit is not None
    assert sorted(commit["files"]) == [
        "README.md", "config.json", "custom_generate/generate.py", "custom_generate/requirements.txt",
    ]  # fmt: skip
    with pytest.raises(SpeculationError, match=r"config\.json"):
        push_folder(tmp_path / "..", "org/other", token=TOKEN)
    assert hub.repo("org/other") is None


# New processes


def run_python(code: str, tmp_path: Path, *, package: bool = True, **env: str) -> str:
    """Run code in a new process; `package` says whether this library is there."""
    site = tmp_path / "site"
    if package and not site.exists():  # what pip would have installed
        (about := site / f"hf_specdec-{__version__}.dist-info").mkdir(parents=True)
        (about / "METADATA").write_text(f"Name: hf-specdec\nVersion: {__version__}\n")
        (site / "hf_specdec").symlink_to(ROOT / "hf_specdec")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    path = [str(site)] * package + [inherited.get("PYTHONPATH", "")]
    env = {**inherited, "PYTHONPATH": ":".join(filter(None, path)), "HF_HOME": str(tmp_path / "home"), **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


RELOAD = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model")
prompt = torch.tensor({PROMPT.tolist()})
print(model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist())
"""


@pytest.mark.grid
@pytest.mark.parametrize("from_model_config", [True, False])
def test_the_flag_is_saved_with_the_model(from_model_config: bool, target: PreTrainedModel, tmp_path: Path) -> None:
    plain = generate(target)
    assert target.generation_config._from_model_config
    if not from_model_config:
        target.generation_config = GenerationConfig(pad_token_id=0)
    target.generation_config.speculation_type = "prompt_lookup"
    target.generation_config.speculation = {"max_match": 5}
    target.save_pretrained(tmp_path / "model")
    with_package = f"""
import hf_specdec
{RELOAD}
from hf_specdec.hub import drafter_from_flag
print(drafter_from_flag(model, "prompt_lookup", {{"max_match": 5}}).last_stats.row_steps > 0)
"""
    assert run_python(with_package, tmp_path).splitlines() == [str(plain), "True"]
    if from_model_config:
        assert run_python(RELOAD, tmp_path, package=False).splitlines() == [str(plain)]


@pytest.mark.fresh_python
def test_custom_generate_needs_nothing_imported(target: PreTrainedModel, hub: HubServer, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    PromptLookupDrafter(max_match=5).push_to_hub("org/drafter", token=TOKEN)
    folder = tmp_path / "drafter"
    PromptLookupDrafter(max_match=6).save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(generate_code("prompt_lookup"))
    code = RELOAD.replace("do_sample=False", "do_sample=False, trust_remote_code=True, custom_generate='org/drafter'")
    code += f"""
import sys
assert "hf_specdec" in sys.modules
kwargs = {{"custom_generate": {str(folder)!r}, "speculation": {{"drafter": {str(folder)!r}}}}}
print(model.generate(prompt, max_new_tokens=12, do_sample=False, trust_remote_code=True, **kwargs)[0].tolist())
"""
    printed = run_python(code, tmp_path, HF_ENDPOINT=hub.url).splitlines()
    assert printed == [str(generate(target))] * 2
