"""Drafters travel: what is saved, or named in a flag, is what generates again; over HTTP see test_hub_http.py."""

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_tools import ON_ANY_TARGET, PROMPT, ROOT, drafter_of, generate, tiny_model
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.budget import Cost, Learned
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import check_made_for, drafter_from_flag, made_for
from hf_specdec.hub.push import generate_code

torch.set_num_threads(1)

PAIR = ROOT / "tests" / "pair"
HUB_CONFIGS = sorted(path.parent for path in PAIR.glob("*/config.json") if path.parent.name not in ("target", "draft"))


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


def loaded_with_generate_py(folder: Path, drafter_type: str) -> PreTrainedModel:
    """A target whose repo carries the `custom_generate/generate.py` of a drafter, and names none in it."""
    tiny_model().save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(generate_code(drafter_type))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


# Folders


@pytest.mark.parametrize("subfolder", ["", "drafters/one"])
@pytest.mark.parametrize("name", ON_ANY_TARGET)
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


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_draft_drafts(quantization: str, target: PreTrainedModel, tmp_path: Path) -> None:
    pytest.importorskip("optimum.quanto")
    DraftModelDrafter(tiny_model(1, hidden_size=128, intermediate_size=128)).save_pretrained(tmp_path)
    drafter = Drafter.from_pretrained(tmp_path, quantization=quantization)
    assert generate(target, assistant_model=drafter) == generate(target)
    with pytest.raises(SpeculationError, match="quantized"):
        drafter.save_pretrained(tmp_path / "copy")


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


# A target that carries custom_generate/


@pytest.mark.parametrize("drafter_type", ["prompt_lookup", "suffix", "hybrid"])
def test_a_target_speculates_where_no_files_are_needed(
    drafter_type: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    model = loaded_with_generate_py(tmp_path, drafter_type)
    plain = generate(target)
    assert generate(model) == plain
    assert model.generate(PROMPT, max_new_tokens=12, do_sample=False, speculation={"max_match": 4})[0].tolist() == plain
    drafter = drafter_from_flag(model, drafter_type, {"max_match": 4})
    assert drafter.last_stats is not None
    drafter.last_stats = None
    assert generate(model, speculation_type="none", speculation={"max_match": 4}) == plain
    assert drafter.last_stats is None


@pytest.mark.parametrize("drafter_type", ["ngram", "draft_model", "pearl", "disco"])
def test_a_target_without_the_files_that_its_type_needs(drafter_type: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculationError, match=rf"{drafter_type}.*drafter"):
        generate(loaded_with_generate_py(tmp_path, drafter_type))


# The repos that come with the package


def demo_model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32)


@pytest.mark.parametrize("folder", HUB_CONFIGS, ids=lambda folder: folder.name)
def test_each_hub_config_loads_generates_and_is_ready_to_push(folder: Path) -> None:
    options = {"worker": "thread"} if folder.name == "pearl" else {}  # a process takes long to start
    target, drafter = demo_model("target"), Drafter.from_pretrained(folder, **options)
    drafter_type = drafter.config.drafter_type
    prompt = torch.tensor([[100, 200, 300, 100, 200, 300, 100]])
    plain = target.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain)
    check_made_for(drafter.config.target, target)
    if drafter.config.target is not None:
        with pytest.raises(SpeculationError, match="vocab_size"):
            check_made_for(drafter.config.target, tiny_model())
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "hf_specdec"
    assert card.data.tags == ["hf_specdec", "speculative-decoding", drafter_type]
    assert card.data.license == "apache-2.0"


READY = sorted(path.parent for path in (ROOT / "hub_configs").glob("*/config.json"))


@pytest.fixture(scope="module")
def as_large_as_the_real_one() -> PreTrainedModel:
    """A random Llama of nine layers, which have the sizes of the target that the ready repos are for."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 9}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=None, pad_token_id=2)).eval()


@pytest.mark.parametrize("folder", READY, ids=lambda folder: folder.name)
def test_each_ready_repo_loads_and_drafts(
    folder: Path, as_large_as_the_real_one: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Widths are still to be learned, so that drafts are verified whatever they promise.
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    drafter = Drafter.from_pretrained(folder, **({"worker": "thread"} if folder.name == "pearl" else {}))
    prompt = torch.tensor([[100, 200, 300, 100, 200, 300, 100]])
    plain = as_large_as_the_real_one.generate(prompt, max_new_tokens=8, do_sample=False)
    fast = as_large_as_the_real_one.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert torch.equal(fast, plain) and drafter.last_stats.drafted_tokens > 0
    if getattr(drafter, "draft_model", None) is not None:
        assert drafter.draft_model.num_parameters() <= 12_000_000
        assert drafter.config.target["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        with pytest.raises(SpeculationError, match="vocab_size"):
            check_made_for(drafter.config.target, tiny_model())
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "hf_specdec" and card.data.license == "apache-2.0"


@pytest.mark.parametrize(("task", "license"), [("e2e", "cc-by-sa-4.0"), ("gsm8k", "mit")])
def test_streams_draft_for_a_target_that_a_lora_has_tuned(
    as_large_as_the_real_one: PreTrainedModel, task: str, license: str
) -> None:
    target, folder = deepcopy(as_large_as_the_real_one), ROOT / "hub_configs" / task
    prompt, options = torch.tensor([[100, 200, 300, 400]]), {"max_new_tokens": 8, "do_sample": False}
    Drafter.from_pretrained(folder / "lora").tune(target)  # type: ignore[attr-defined]
    plain = target.generate(prompt, **options)
    drafter = Drafter.from_pretrained(folder / "streaming")
    assert torch.equal(target.generate(prompt, **options, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens
    for name in ("lora", "streaming"):
        assert (folder / name / "model.safetensors").stat().st_size < 1_500_000
        assert ModelCard.load(folder / name / "README.md").data.license == license


def test_the_ready_repos_store_their_draft_once() -> None:
    (stored,) = (ROOT / "hub_configs").glob("**/draft_model/model.safetensors")
    assert stored.parents[1].name == "draft_model" and stored.stat().st_size <= 13_000_000
    assert {folder.name for folder in READY} >= {"prompt_lookup", "suffix", "draft_model", "hybrid", "pearl"}


def test_there_is_a_hub_config_for_each_family() -> None:
    assert {folder.name for folder in HUB_CONFIGS} >= {
        "prompt_lookup",
        "draft_model",
        "hybrid",
        "pearl",
        "ngram",
        "suffix",
    }


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
    for words in ("1.50x (1.40 to 1.60)", "2.25", "12.3", "Measured on cpu."):
        assert words in card.text
    with pytest.raises(SpeculationError, match="result file"):
        PromptLookupDrafter().save_pretrained(tmp_path / "other", results=tmp_path / "drafter" / "config.json")
    assert not (tmp_path / "other").exists()
