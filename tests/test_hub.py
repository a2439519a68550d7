"""Drafters travel: what is saved, pushed and named in a flag is what generates again."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, ModelCard, constants
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.drafters.ngram import Level, NGramDrafter, NGramModel
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import check_made_for, drafter_from_flag, made_for, push_folder
from hf_specdec.registry import drafter_class, drafter_types

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
HUB_CONFIGS = sorted(path.parent for path in (ROOT / "hub_configs").glob("*/config.json"))
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def tiny_model(seed: int = 0, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1} | sizes
    config = LlamaConfig(num_attention_heads=1, num_key_value_heads=1, eos_token_id=None, pad_token_id=0, **shape)
    return LlamaForCausalLM(config).eval()


def tiny_ngram(vocab_size: int = 40) -> NGramDrafter:
    even = np.full(vocab_size, 1 / vocab_size, dtype=np.float32)
    keys = np.array([5 * vocab_size + 6, 6 * vocab_size + 7], dtype=np.int64)
    half = np.full(2, 0.5, dtype=np.float32)
    backoff = np.ones(vocab_size, dtype=np.float32)
    backoff[[5, 6]] = 0.5
    return NGramDrafter(
        NGramModel(even, backoff, [Level(keys, half, np.ones(2, dtype=np.float32))]), num_draft_tokens=2
    )


def drafter_of(name: str) -> Drafter:
    """One drafter of each registered type."""
    cls = drafter_class(name)
    if cls is NGramDrafter:
        return tiny_ngram()
    return cls(tiny_model(seed=1)) if cls.needs_draft_model else cls()  # type: ignore[call-arg]


def generate(target: PreTrainedModel, **kwargs: Any) -> list[int]:
    return target.generate(PROMPT, max_new_tokens=12, do_sample=False, **kwargs)[0].tolist()


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub of our own, and an empty cache. What HF_ENDPOINT and HF_HOME set on import is set here afterwards."""
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield server


# Folders


@pytest.mark.parametrize("subfolder", ["", "drafters/one"])
@pytest.mark.parametrize("name", drafter_types())
def test_save_load_generate(name: str, subfolder: str, target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = drafter_of(name)
    drafter.save_pretrained(tmp_path / subfolder, target=target)
    loaded = Drafter.from_pretrained(tmp_path, subfolder=subfolder)
    assert type(loaded) is type(drafter)
    plain = generate(target)
    assert generate(target, assistant_model=drafter) == plain
    assert generate(target, assistant_model=loaded) == plain
    for key, weight in drafter.weights().items():
        assert torch.equal(weight, loaded.weights()[key])


def test_config_holds_type_versions_options_and_target(target: PreTrainedModel, tmp_path: Path) -> None:
    PromptLookupDrafter(max_match=5).save_pretrained(tmp_path, target=target)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["drafter_type"] == "prompt_lookup"
    assert content["format_version"] == 1
    assert content["hf_specdec_version"]
    assert content["max_match"] == 5
    assert content["target"] == {"vocab_size": 40, "hidden_size": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json"]


def test_saving_again_keeps_everything(target: PreTrainedModel, tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(1), num_draft_tokens=3).save_pretrained(tmp_path / "a", target=target)
    Drafter.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert first == second


def test_options_override_what_is_stored(tmp_path: Path) -> None:
    PromptLookupDrafter(max_match=5).save_pretrained(tmp_path)
    assert Drafter.from_pretrained(tmp_path, max_draft_tokens=3).config.to_dict() | {"max_match": 0} == (
        PromptLookupDrafter(max_draft_tokens=3).config.to_dict() | {"max_match": 0}
    )
    with pytest.raises(SpeculationError, match=r"unknown option 'gamma'.*max_draft_tokens"):
        Drafter.from_pretrained(tmp_path, gamma=3)


def test_another_class_is_refused(tmp_path: Path) -> None:
    PromptLookupDrafter().save_pretrained(tmp_path)
    assert isinstance(PromptLookupDrafter.from_pretrained(tmp_path), PromptLookupDrafter)
    with pytest.raises(SpeculationError, match=r"PromptLookupDrafter\.from_pretrained"):
        DraftModelDrafter.from_pretrained(tmp_path)


def test_dtype_reaches_the_draft_model(tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(1)).save_pretrained(tmp_path)
    assert Drafter.from_pretrained(tmp_path, dtype=torch.bfloat16).draft_model.dtype is torch.bfloat16


def test_a_draft_model_of_ones_own(tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(1)).save_pretrained(tmp_path)
    mine = tiny_model(2)
    assert Drafter.from_pretrained(tmp_path, draft_model=mine).draft_model is mine


@pytest.mark.parametrize("quantization", ["int8", "int4", "int3"])
def test_quantization_says_what_is_missing(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    DraftModelDrafter(tiny_model(1)).save_pretrained(tmp_path)
    with pytest.raises(
        SpeculationError, match=r"int8, int4" if quantization == "int3" else r"hf-specdec\[quantization\]"
    ):
        Drafter.from_pretrained(tmp_path, quantization=quantization)


# The target


@pytest.mark.parametrize("other", [{"vocab_size": 41}, {"hidden_size": 16}])
def test_a_drafter_for_another_target_is_refused(other: dict[str, int], target: PreTrainedModel) -> None:
    made = made_for(target)
    check_made_for(made, target)
    check_made_for(None, target)
    check_made_for({}, tiny_model(**other))
    with pytest.raises(SpeculationError, match=next(iter(other))):
        check_made_for(made, tiny_model(**other))


def test_a_drafter_for_another_tokenizer_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    def tokenizer(swap: bool) -> PreTrainedTokenizerFast:
        words = {f"w{i}": i for i in range(40)}
        if swap:
            words["w1"], words["w2"] = 2, 1
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))

    target.save_pretrained(tmp_path)
    tokenizer(swap=False).save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert made_for(loaded) == made_for(loaded, tokenizer(swap=False))
    check_made_for(made_for(loaded, tokenizer(swap=False)), loaded)
    with pytest.raises(SpeculationError, match="another tokenizer"):
        check_made_for(made_for(loaded, tokenizer(swap=True)), loaded)


def test_no_path_of_this_machine_is_saved(target: PreTrainedModel, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    DraftModelDrafter(loaded).save_pretrained(tmp_path / "drafter", target=loaded)
    for path in (tmp_path / "drafter").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path


# The flag


def test_the_flag_builds_once_per_target(target: PreTrainedModel) -> None:
    first = drafter_from_flag(target, "prompt_lookup", {"max_match": 4})
    assert drafter_from_flag(target, "prompt_lookup", {"max_match": 4}) is first
    assert drafter_from_flag(target, "prompt_lookup", {"max_match": 5}) is not first
    assert drafter_from_flag(tiny_model(3), "prompt_lookup", {"max_match": 4}) is not first


def test_the_flag_loads_once_and_keeps_the_draft_model(target: PreTrainedModel, tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(1)).save_pretrained(tmp_path)
    speculation = {"drafter": str(tmp_path), "num_draft_tokens": 2}
    first = drafter_from_flag(target, "draft_model", speculation)
    assert drafter_from_flag(target, "draft_model", speculation) is first
    assert first.config.num_draft_tokens == 2
    mine = tiny_model(2)
    assert drafter_from_flag(target, "draft_model", speculation, mine).draft_model is mine


@pytest.mark.parametrize(
    ("speculation_type", "speculation", "words"),
    [
        ("oracle", {}, "prompt_lookup"),
        ("prompt_lookup", {"gamma": 3}, "max_draft_tokens"),
        ("prompt_lookup", {"revision": "main"}, "max_draft_tokens"),
        ("prompt_lookup", "deep", "dict"),
        ("prompt_lookup", {"max_match": torch.tensor(3)}, "JSON"),
        ("prompt_lookup", {"drafter": "no/such/folder"}, "no/such/folder"),
        ("draft_model", {}, "assistant_model"),
    ],
)
def test_the_flag_says_what_is_wrong(
    speculation_type: str, speculation: Any, words: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(SpeculationError, match=words):
        drafter_from_flag(target, speculation_type, speculation)


def test_the_flag_takes_a_draft_model_only_where_one_drafts(target: PreTrainedModel) -> None:
    with pytest.raises(SpeculationError, match="without a model"):
        drafter_from_flag(target, "prompt_lookup", None, tiny_model(1))


def test_settings_of_a_plain_assistant(target: PreTrainedModel) -> None:
    assistant = tiny_model(1)
    assistant.generation_config.num_assistant_tokens = 3
    assert drafter_from_flag(target, "draft_model", None, assistant).config.num_draft_tokens == 3
    assert drafter_from_flag(target, "draft_model", {"num_draft_tokens": 2}, assistant).config.num_draft_tokens == 2
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    with pytest.raises(SpeculationError, match="num_assistant_tokens_schedule='heuristic'"):
        drafter_from_flag(target, "draft_model", None, assistant)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.4
    with pytest.raises(SpeculationError, match=r"assistant_confidence_threshold=0\.4"):
        drafter_from_flag(target, "draft_model", None, assistant)


# The Hub


@pytest.mark.parametrize("name", drafter_types())
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
    draft.push_to_hub("org/draft", token=TOKEN)
    commit = HfApi().model_info("org/draft").sha
    drafter = DraftModelDrafter(LlamaForCausalLM.from_pretrained("org/draft"))
    drafter.save_pretrained(tmp_path / "drafter", embed_draft_model=False)
    content = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert content["draft_model"] == {"repo_id": "org/draft", "revision": commit}
    tiny_model(7).push_to_hub("org/draft", token=TOKEN)  # a later change does not reach the drafter
    (tmp_path / "org" / "draft").mkdir(parents=True)  # nor does a folder of that name
    loaded = Drafter.from_pretrained(tmp_path / "drafter")
    for key, weight in draft.state_dict().items():
        assert torch.equal(weight, loaded.draft_model.state_dict()[key])
    with pytest.raises(SpeculationError, match="embed"):
        DraftModelDrafter(draft).save_pretrained(tmp_path / "other", embed_draft_model=False)


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


# Cards


def test_the_card_has_metadata_and_measured_figures(target: PreTrainedModel, tmp_path: Path) -> None:
    run = {
        "name": "prompt_lookup",
        "dataset": "gsm8k",
        "batch_size": 1,
        "temperature": 0.0,
        "prompts": 4,
        "tokens_per_second": 12.34,
        "speedup": 1.5,
        "speedup_interval": [1.4, 1.6],
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 0.5,
        "identical": True,
    }
    (tmp_path / "results.json").write_text(json.dumps({"provenance": {"device": "cpu"}, "runs": [run]}))
    PromptLookupDrafter().save_pretrained(
        tmp_path / "drafter", license="apache-2.0", datasets=["openai/gsm8k"], results=tmp_path / "results.json"
    )
    card = ModelCard.load(tmp_path / "drafter" / "README.md")
    assert card.data.library_name == "hf_specdec"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.tags == ["hf_specdec", "speculative-decoding", "prompt_lookup"]
    for words in ("1.50x (1.40 to 1.60)", "2.25", "50%", "12.3", "device: cpu"):
        assert words in card.text
    with pytest.raises(SpeculationError, match="result file"):
        PromptLookupDrafter().save_pretrained(tmp_path / "other", results=tmp_path / "drafter" / "config.json")
    assert not (tmp_path / "other").exists()
