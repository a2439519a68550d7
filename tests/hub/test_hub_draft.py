"""Where a draft model lives: in the drafter's repo, in a folder beside it, or in a repo of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, HubServer
from hub_tools import ROOT, generate, hub_of_our_own, push_model, tiny_model
from huggingface_hub import HfApi, ModelCard, constants
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.cli import app
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import drafter_from_flag, push_folder

torch.set_num_threads(1)


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_of_our_own(tmp_path, monkeypatch) as server:
        yield server


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_weights(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    return all(torch.equal(weight, b.state_dict()[key]) for key, weight in a.state_dict().items())


@pytest.fixture
def family(tmp_path: Path, target: PreTrainedModel) -> Path:
    """A folder with a drafter that has its draft model embedded, and one beside it that names it."""
    folder = tmp_path / "family"
    DraftModelDrafter(tiny_model(1)).save_pretrained(folder / "one", target=target)
    draft = AutoModelForCausalLM.from_pretrained(folder / "one" / "draft_model")
    HybridDrafter(draft).save_pretrained(folder / "two", target=target, embed_draft_model=False)
    return folder


# ------------------------------------------------------------------ beside


def test_a_draft_is_stored_once_and_named_by_the_drafter_beside(family: Path, target: PreTrainedModel) -> None:
    assert config_of(family / "two")["draft_model"] == {"path": "../one/draft_model"}
    assert sorted(path.name for path in (family / "two").iterdir()) == ["README.md", "config.json"]
    assert "In `../one/draft_model`, beside this folder." in (family / "two" / "README.md").read_text()
    loaded = Drafter.from_pretrained(family / "two")
    assert same_weights(loaded.draft_model, tiny_model(1))
    assert generate(target, assistant_model=loaded) == generate(target)
    assert isinstance(drafter_from_flag(target, "hybrid", {"drafter": str(family / "two")}), HybridDrafter)


@pytest.mark.parametrize("where", [".", "two", "../family/two"])
def test_it_is_found_from_wherever_the_process_runs(where: str, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(family / "two" if where == "." else family)
    assert same_weights(Drafter.from_pretrained(where).draft_model, tiny_model(1))


def test_a_drafter_in_a_subfolder_names_its_neighbour(family: Path) -> None:
    assert same_weights(Drafter.from_pretrained(family, subfolder="two").draft_model, tiny_model(1))


def test_a_plain_model_folder_may_be_named(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    DraftModelDrafter(draft).save_pretrained(tmp_path / "drafter", embed_draft_model=False)
    assert config_of(tmp_path / "drafter")["draft_model"] == {"path": "../draft"}
    assert same_weights(Drafter.from_pretrained(tmp_path / "drafter").draft_model, tiny_model(1))


def test_saving_again_names_it_where_it_is_still_beside_and_embeds_it_elsewhere(family: Path, tmp_path: Path) -> None:
    loaded = Drafter.from_pretrained(family / "two")
    loaded.save_pretrained(family / "three")
    assert config_of(family / "three") == config_of(family / "two")
    loaded.save_pretrained(tmp_path / "elsewhere" / "four")
    assert config_of(tmp_path / "elsewhere" / "four")["draft_model"] == {"subfolder": "draft_model"}
    loaded.save_pretrained(family / "five", embed_draft_model=True)
    assert config_of(family / "five")["draft_model"] == {"subfolder": "draft_model"}
    for folder in (family / "three", tmp_path / "elsewhere" / "four", family / "five"):
        assert same_weights(Drafter.from_pretrained(folder).draft_model, tiny_model(1))
    with pytest.raises(SpeculationError, match="beside the one to save into"):
        loaded.save_pretrained(tmp_path / "elsewhere" / "six", embed_draft_model=False)


def test_a_draft_inside_the_folder_is_not_beside_it(family: Path) -> None:
    drafter = DraftModelDrafter(AutoModelForCausalLM.from_pretrained(family / "one" / "draft_model"))
    with pytest.raises(SpeculationError, match="beside the one to save into"):
        drafter.save_pretrained(family / "one", embed_draft_model=False)


# ------------------------------------------------------------------ on the Hub


def test_pushed_it_becomes_a_repo_at_a_commit(
    family: Path, target: PreTrainedModel, hub: HubServer, tmp_path: Path
) -> None:
    with pytest.raises(SpeculationError, match=r"names its draft model in '\.\./one/draft_model'.*--draft-repo"):
        push_folder(family / "two", "org/two", token=TOKEN)
    with pytest.raises(SpeculationError, match=r"draft_repo='org/one' could not be read"):
        push_folder(family / "two", "org/two", token=TOKEN, draft_repo="org/one")
    assert hub.repo("org/two") is None
    push_folder(family / "one", "org/one", token=TOKEN)
    before = config_of(family / "two")
    push_folder(family / "two", "org/two", token=TOKEN, draft_repo="org/one")
    assert config_of(family / "two") == before

    named = {"repo_id": "org/one", "revision": HfApi().model_info("org/one").sha, "subfolder": "draft_model"}
    commit = hub.commit("org/two", "main")
    assert commit is not None and not [name for name in commit["files"] if name.endswith(".safetensors")]
    assert json.loads(hub.blob(commit["files"]["config.json"]).read_text())["draft_model"] == named
    card = hub.blob(commit["files"]["README.md"]).read_text()
    assert "[`org/one`](https://huggingface.co/org/one), folder `draft_model`" in card and ".." not in card

    DraftModelDrafter(tiny_model(7)).push_to_hub("org/one", token=TOKEN)  # a later change does not reach the drafter
    (tmp_path / "org" / "one").mkdir(parents=True)
    loaded = Drafter.from_pretrained("org/two")
    assert same_weights(loaded.draft_model, tiny_model(1))
    assert generate(target, assistant_model=loaded) == generate(target)
    asked = len(hub.requests)
    assert same_weights(Drafter.from_pretrained("org/two", local_files_only=True).draft_model, tiny_model(1))
    assert len(hub.requests) == asked
    loaded.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["draft_model"] == named


def test_a_model_repo_may_hold_it(hub: HubServer, tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    push_model(draft, "org/draft")
    DraftModelDrafter(draft).save_pretrained(tmp_path / "drafter", embed_draft_model=False)
    push_folder(tmp_path / "drafter", "org/drafter", token=TOKEN, draft_repo="org/draft")
    assert same_weights(Drafter.from_pretrained("org/drafter").draft_model, tiny_model(1))


def test_a_repo_with_another_draft_is_refused(family: Path, hub: HubServer) -> None:
    DraftModelDrafter(tiny_model(7)).push_to_hub("org/other", token=TOKEN)
    PromptLookupDrafter().push_to_hub("org/none", token=TOKEN)
    for repo, words in (("org/other", "a different model.safetensors"), ("org/none", "lacks model.safetensors")):
        with pytest.raises(SpeculationError, match=words):
            push_folder(family / "two", "org/two", token=TOKEN, draft_repo=repo)
    with pytest.raises(SpeculationError, match="leave draft_repo"):
        push_folder(family / "one", "org/one", token=TOKEN, draft_repo="org/one")
    assert hub.repo("org/two") is None and hub.repo("org/one") is None


def test_a_repo_on_the_hub_names_no_folder_beside_it(family: Path, hub: HubServer) -> None:
    """Such as one that was uploaded by hand."""
    api = HfApi(token=TOKEN)
    api.create_repo("org/two")
    api.upload_folder(repo_id="org/two", folder_path=family / "two")
    with pytest.raises(SpeculationError, match=r"config\.json: draft_model\.path .* --draft-repo"):
        Drafter.from_pretrained("org/two")
    mine = tiny_model(2)
    assert Drafter.from_pretrained("org/two", draft_model=mine).draft_model is mine


def test_push_to_hub_embeds_what_was_beside(family: Path, hub: HubServer) -> None:
    Drafter.from_pretrained(family / "two").push_to_hub("org/two", token=TOKEN)
    assert same_weights(Drafter.from_pretrained("org/two").draft_model, tiny_model(1))


def test_the_ready_repos_store_the_demos_draft_once() -> None:
    for name in ("draft_model", "hybrid", "pearl", "disco-demo"):
        assert config_of(ROOT / "tests" / "pair" / name)["draft_model"] == {"path": "../draft"}


def test_the_card_of_a_named_draft_says_whose_training_it_was(family: Path) -> None:
    card = ModelCard.load(family / "two" / "README.md").text
    assert "only the draft model is trained" in card
    assert "Not stated" in ModelCard.load(family / "one" / "README.md").text


def test_the_push_command_takes_the_drafts_repo_and_a_licence(
    family: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, more in (("one", []), ("two", ["--draft-repo", "org/one", "--license", "apache-2.0"])):
        done = CliRunner().invoke(app, ["push", str(family / name), "--repo-id", f"org/{name}", *more])
        assert done.exit_code == 0, done.output
    assert same_weights(Drafter.from_pretrained("org/two").draft_model, tiny_model(1))
    commit = hub.commit("org/two", "main")
    assert commit is not None
    assert ModelCard(hub.blob(commit["files"]["README.md"]).read_text()).data.license == "apache-2.0"
