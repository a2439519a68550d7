"""`auto`: what it chooses for a target, what it says of it, and that it fetches no more than it may."""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dflash_models
import eagle_heads
import gemma4_models
import models
import pytest
import torch
import transformers as tf
from clocks import set_times
from continuations import same_greedy_text, sampling_p_value
from hub_server import TOKEN, HubServer
from hub_tools import PROMPT, ROOT, generate, hub_of_our_own, push_model, tiny_model
from huggingface_hub import HfApi, constants, snapshot_download

from hf_specdec import (
    AutoDrafter,
    BatchDecoder,
    DFlashDrafter,
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    Gemma4Drafter,
    HybridDrafter,
    MtpDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SpeculationWarning,
    SuffixDrafter,
)
from hf_specdec.config import DrafterConfig
from hf_specdec.drafters.auto import choosing
from hf_specdec.hub import known
from hf_specdec.hub.fetching import Allowance
from hf_specdec.hub.files import HubSource
from hf_specdec.hub.registry import drafter_types
from hf_specdec.target.packing import pack_linear
from hf_specdec.tools.loading.drafters import load_drafter

LIKE = {"model_type": "llama", "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 2}
"""what a `tiny_model` is"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_of_our_own(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def target() -> Any:
    return tiny_model()


def knowing(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> None:
    """Has the index hold these entries alone, for `tiny_model` by name or likeness."""
    made = {"kind": "hybrid", "targets": ("org/tiny",), "like": LIKE, "source": "https://example.org"}
    found = tuple(known.Known(**made | entry) for entry in entries)
    monkeypatch.setattr(known, "index", lambda: found)


def speculated(target: Any, drafter: AutoDrafter | None = None) -> tuple[Drafter, str]:
    """Who drafts, and the note that says why; the text is plain decoding's, and the statistics are the call's."""
    drafter = drafter or AutoDrafter()
    assert generate(target, assistant_model=drafter) == generate(target, speculation_type="none")
    assert drafter.last_stats is not None and drafter.last_stats.mode != "plain"
    return drafter.for_target(target), drafter.last_stats.notes[0]


def downloads(hub: HubServer) -> list[str]:
    """Files of weights that were fetched."""
    return [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]


# ---------------------------------------------------------------------- what needs nothing

TEN = ["Llama", "Qwen3", "Gemma3", "Phi-3", "GPT-2", "GPT-NeoX", "Bloom", "Mixtral", "DeepSeek-V3", "LFM2"]


@pytest.mark.parametrize("lengths", [[9], [3, 14, 6, 9]], ids=["one row", "four rows"])
@pytest.mark.parametrize("name", TEN)
def test_the_text_is_plain_decodings_in_any_architecture(name: str, lengths: list[int]) -> None:
    target = models.build(name, "eager" if name == "Bloom" else "sdpa")
    options = models.prompts(lengths) | {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**options)
    for _ in range(2):
        assert torch.equal(target.generate(**options, speculation_type="auto"), plain)


def test_what_nobody_knows_is_drafted_for_without_a_model(target: Any, hub: HubServer, recwarn: Any) -> None:
    drafter, note = speculated(target)
    assert isinstance(drafter, HybridDrafter) and drafter.draft_model is None and drafter.store is not None
    assert note.startswith("auto chose hybrid (without a draft model)") and "LlamaForCausalLM" in note
    assert not hub.requests and not [w for w in recwarn if issubclass(w.category, SpeculationWarning)]


@pytest.mark.usefixtures("width_costs_nothing")
def test_greedy_and_sampled() -> None:
    assert same_greedy_text(AutoDrafter(), [3, 14, 1, 9], 4).notes[0].startswith("auto chose")
    assert sampling_p_value(AutoDrafter(), {"temperature": 1.5}) > 1e-3


def test_a_flag_chooses_once_and_tells(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    known_for = choosing.known_for
    monkeypatch.setattr(choosing, "known_for", lambda model: asked.append(model) or known_for(model))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(2):
        out = target.generate(PROMPT, **options, speculation_type="auto")
        assert out.sequences[0].tolist() == generate(target) and out.speculation.notes[0].startswith("auto chose")
    target.generation_config.speculation_type, target.generation_config.speculation = "auto", {"max_download_gb": 0}
    assert target.generate(PROMPT, **options).speculation.notes[0].startswith("auto chose")
    assert asked == [target, target]  # once for each set of options


def test_an_interrupt_passes_and_the_next_call_chooses(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    drafter = AutoDrafter()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(choosing, "known_for", interrupted)
        generate(target, assistant_model=drafter)
    speculated(target, drafter)


def test_a_draft_model_that_is_given_drafts(target: Any, tmp_path: Path) -> None:
    draft = tiny_model(1)
    drafter, note = speculated(target, AutoDrafter(draft))
    assert isinstance(drafter, HybridDrafter) and drafter.draft_model is draft and "was given" in note
    assert generate(target, assistant_model=draft, speculation_type="auto") == generate(target)
    AutoDrafter(draft, max_download_gb=1).save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, AutoDrafter) and loaded.draft_model is not None and loaded.config.max_download_gb == 1


@pytest.mark.parametrize("lengths", [[9], [3, 14, 6, 9]], ids=["one row", "four rows"])
def test_it_takes_what_the_drafter_that_it_chose_takes(lengths: list[int]) -> None:
    """Round for round, where times are the same: its part ends with the choice."""
    draft, told = models.llama(), []
    for drafter in (AutoDrafter(draft), HybridDrafter(draft, memory_mb=choosing.MEMORY_MB)):
        target = models.llama()  # of which nothing is known
        with set_times():
            for seed in range(4):
                inputs = models.prompts(lengths, seed=seed)
                target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=drafter)
                stats = drafter.last_stats
                assert stats is not None
                told.append((stats.accepted_tokens, stats.target_calls, stats.draft_calls, stats.sources))
    assert told[:4] == told[4:] and any(accepted for accepted, *_ in told)


def test_wherever_a_drafter_is_named(target: Any) -> None:
    plain = target.generate(PROMPT, max_new_tokens=12, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    with BatchDecoder(target, "auto") as decoder:
        assert decoder.submit(PROMPT, max_new_tokens=12, do_sample=False).result() == plain
        assert decoder.stats.notes[0].startswith("auto chose hybrid")
    assert isinstance(load_drafter("auto:max_download_gb=0", None, target=target), HybridDrafter)
    with pytest.raises(SpeculationError, match="a type such as 'auto', got 'autos'"):
        BatchDecoder(target, "autos")


def test_beams_are_searched_plainly(target: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 2, "do_sample": False}
    plain, drafter = target.generate(PROMPT, **options), AutoDrafter()
    with pytest.warns(SpeculationWarning, match="num_beams=2"):
        assert torch.equal(target.generate(PROMPT, **options, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and drafter.last_stats.emitted_tokens == 12


# ---------------------------------------------------------------------- what the target brings


def test_layers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_heads import mtp, save_with_layers

    target, layers = mtp("GLM-4-MoE", 1)
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9].*"])
    save_with_layers(target, layers, tmp_path / "whole")
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    drafter, note = speculated(loaded)
    assert isinstance(drafter, HybridDrafter) and isinstance(drafter.model_drafter, MtpDrafter)
    assert note.startswith("auto chose hybrid (its own layers)")
    target.save_pretrained(tmp_path / "without")
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "without")
    with pytest.warns(SpeculationWarning, match="its own layers was left out: .*holds no layers"):
        drafter, note = speculated(loaded)
    assert isinstance(drafter, HybridDrafter) and "left out" in note


@pytest.mark.parametrize("saved", [False, True])
def test_a_flag_of_its_own(target: Any, saved: bool, tmp_path: Path) -> None:
    SuffixDrafter(max_match=9).save_pretrained(tmp_path)
    options: dict[str, Any] = {"drafter": str(tmp_path)} if saved else {"max_match": 9}
    config = target.generation_config
    config.speculation_type, config.speculation = "suffix", options | {"verification": "token"}
    target.generate(PROMPT, max_new_tokens=4, do_sample=False, speculation_type="auto")
    drafter, note = speculated(target)
    assert isinstance(drafter, SuffixDrafter) and drafter.config.max_match == 9
    assert "the model's generation config asks for it" in note
    config.speculation = {"drafter": str(tmp_path / "gone")}
    with pytest.warns(SpeculationWarning, match="gone was left out"):
        assert isinstance(speculated(target)[0], HybridDrafter)


def test_a_flag_without_options(target: Any) -> None:
    target.generation_config.speculation_type = "suffix"
    assert isinstance(speculated(target)[0], SuffixDrafter)


def test_a_drafter_that_chooses_is_not_chosen(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    AutoDrafter().save_pretrained(tmp_path / "drafter")
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.warns(SpeculationWarning, match="auto has chosen"):
        assert isinstance(speculated(loaded)[0], HybridDrafter)


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert not Allowance(2.0).asks


def test_a_drafter_in_its_folder(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    DraftModelDrafter(tiny_model(1)).save_pretrained(tmp_path / "drafter", target=target)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    drafter, note = speculated(loaded)
    assert isinstance(drafter, DraftModelDrafter) and "it lies beside the model" in note


@pytest.mark.parametrize("harm", ["pickle", "json", "other target", "no weights"])
def test_a_broken_one_is_left_out_with_one_line(harm: str, target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    folder = tmp_path / "drafter"
    DraftModelDrafter(tiny_model(1)).save_pretrained(folder, target=tiny_model(hidden_size=16) if harm == "t" else None)
    if harm == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif harm == "json":
        (folder / "config.json").write_text("{")
    elif harm == "no weights":
        shutil.rmtree(folder / "draft_model")
    else:
        content = json.loads((folder / "config.json").read_text())
        content["target"] = {"vocab_size": 41}
        (folder / "config.json").write_text(json.dumps(content))
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.warns(SpeculationWarning) as told:
        drafter, note = speculated(loaded)
    assert isinstance(drafter, HybridDrafter) and drafter.draft_model is None and "left out" in note
    lines = [str(w.message) for w in told if "left out" in str(w.message)]
    assert len(lines) == 1 and "\n" not in lines[0]


def test_a_drafter_in_its_repo(hub: HubServer) -> None:
    push_model(tiny_model(), "org/tiny")
    PromptLookupDrafter(max_match=5).push_to_hub("org/other", token=TOKEN)
    loaded = tf.AutoModelForCausalLM.from_pretrained(snapshot_download("org/tiny"), dtype=torch.float32)
    loaded.config.name_or_path = loaded.name_or_path = "org/tiny"
    loaded.config._commit_hash = hub.commit("org/tiny", "main")["id"]
    assert isinstance(speculated(loaded)[0], HybridDrafter)  # there is none
    files = {f"drafter/{n}": b for n, b in hub.commit("org/other", "main")["files"].items()}
    tiny = hub.commit("org/tiny", "main")
    loaded.config._commit_hash = hub.add_commit("org/tiny", "main", tiny["files"] | files, "drafter", tiny["id"])
    drafter, note = speculated(loaded)
    assert isinstance(drafter, PromptLookupDrafter) and "(org/tiny/drafter)" in note
    asked = len(hub.requests)
    drafter, _ = speculated(loaded, AutoDrafter(max_download_gb=0))
    assert isinstance(drafter, PromptLookupDrafter) and len(hub.requests) == asked  # from the cache


# ---------------------------------------------------------------------- what is known for it


@pytest.mark.parametrize("name", ["org/tiny", "folder", "org/a-tuned-one"])
def test_a_known_draft_model(
    name: str, target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    push_model(tiny_model(1), "org/draft")
    knowing(monkeypatch, {"repo": "org/draft"})
    (tmp_path / "tiny").mkdir()
    target.config.name_or_path = str(tmp_path / "tiny") if name == "folder" else name
    drafter, note = speculated(target)
    assert isinstance(drafter, HybridDrafter) and drafter.draft_model.dtype is torch.float32
    assert "(org/draft): known for org/tiny" in note and ("like" in note) is ("tuned" in name)


PUBLISHED = {
    "SafeAILab": (eagle_heads, "SafeAILab", EagleDrafter),
    "speculators": (eagle_heads, "speculators", EagleDrafter),
    "z-lab": (dflash_models, "full", DFlashDrafter),
    "Google": (gemma4_models, "31B", Gemma4Drafter),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_known_heads_as_they_are_published(form: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made, which, cls = PUBLISHED[form]
    api, target = HfApi(endpoint=constants.ENDPOINT, token=TOKEN), made.target()
    api.create_repo("org/head")
    api.upload_folder(repo_id="org/head", folder_path=made.folder_of(which))
    like = {name: getattr(target.config, name) for name in known.SIZES}
    knowing(monkeypatch, {"repo": "org/head", "kind": cls.config_class.drafter_type, "like": like})
    drafter, note = speculated(target)
    assert isinstance(drafter, HybridDrafter) and isinstance(drafter.model_drafter, cls)
    assert note.startswith("auto chose hybrid (org/head): known for org/tiny")


def test_what_is_known_by_name_comes_first(target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        push_model(tiny_model(1), f"org/{name}")
    knowing(monkeypatch, {"repo": "org/one", "targets": ("org/other",)}, {"repo": "org/two"})
    target.config.name_or_path = "org/tiny"
    assert "(org/two)" in speculated(target)[1]
    assert not known.known_for(tiny_model(hidden_size=16))


def test_it_is_packed_where_the_target_is(target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    push_model(tiny_model(1), "org/draft")
    knowing(monkeypatch, {"repo": "org/draft"})
    pack_linear(target)
    assert pack_linear(speculated(target)[0].draft_model) == 0  # all are


def test_no_more_is_downloaded_than_is_allowed(target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    push_model(tiny_model(1), "org/draft")
    knowing(monkeypatch, {"repo": "org/draft"})
    small = AutoDrafter(max_download_gb=1e-6)
    with pytest.warns(SpeculationWarning, match=r'org/draft was left out: .*speculation=\{"max_download_gb": 1\}'):
        assert speculated(target, small)[0].draft_model is None
    assert not downloads(hub)
    assert speculated(target, AutoDrafter(max_download_gb=1))[0].draft_model is not None
    assert len(downloads(hub)) == 1
    with pytest.warns(SpeculationWarning, match="left out"):  # what is in the cache costs nothing, a second one does
        allowance = Allowance(1e-6)
        allowance.model(HubSource("org/draft"))
        push_model(tiny_model(2), "org/draft")
        knowing(monkeypatch, {"repo": "org/draft"})
        speculated(target, AutoDrafter(max_download_gb=1e-6))


def test_a_large_download_is_announced(target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    push_model(tiny_model(1), "org/draft")
    knowing(monkeypatch, {"repo": "org/draft"})
    monkeypatch.setattr("hf_specdec.hub.fetching.WORTH_SAYING", 1000)
    with pytest.warns(SpeculationWarning, match=r'downloading org/draft .*\{"max_download_gb": 0\} prevents it'):
        speculated(target)


@pytest.mark.parametrize("offline", [False, True], ids=["nothing allowed", "HF_HUB_OFFLINE"])
def test_without_the_network_the_cache_is_all(
    offline: bool, target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_model(tiny_model(1), "org/draft")
    knowing(monkeypatch, {"repo": "org/draft"})
    make = AutoDrafter if offline else lambda: AutoDrafter(max_download_gb=0)
    asked = len(hub.requests)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.warns(SpeculationWarning, match="org/draft was left out"):
            assert speculated(target, make())[0].draft_model is None
    assert len(hub.requests) == asked
    speculated(target)
    asked = len(hub.requests)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert speculated(target, make())[0].draft_model is not None
    assert len(hub.requests) == asked


@pytest.mark.parametrize("harm", ["no such repo", "private", "other tokenizer", "unknown kind", "no server"])
def test_what_cannot_be_had_is_left_out(
    harm: str, target: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_model(tiny_model(1, vocab_size=4000), "org/draft")
    if harm == "private":
        hub.save_repo("org/draft", hub.repo("org/draft") | {"private": True})
    kind = "unheard_of" if harm == "unknown kind" else "hybrid"
    knowing(monkeypatch, {"repo": "org/none" if harm == "no such repo" else "org/draft", "kind": kind})
    if harm == "no server":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    asked = len(hub.requests)
    with pytest.warns(SpeculationWarning) as told:
        drafter, note = speculated(target)
    assert drafter.draft_model is None and "left out" in note
    assert len([w for w in told if "left out" in str(w.message)]) == 1
    assert harm != "unknown kind" or len(hub.requests) == asked


# ---------------------------------------------------------------------- the index


def test_the_index_is_whole() -> None:
    """Every entry names a kind, targets, sizes and a source, and nothing twice."""
    content = json.loads(known.INDEX.read_text())
    assert content["format_version"] == 1 and known.INDEX.samefile(ROOT / "hub_configs" / "index.json")
    optional = {"repo", "folder"}
    for entry in content["drafters"]:
        assert {f.name for f in dataclasses.fields(known.Known)} - optional <= set(entry)
        assert len(optional & set(entry)) == 1 and entry["kind"] in drafter_types()
        assert set(known.SIZES) <= set(entry["like"]) <= {*known.SIZES, "tokenizer_hash"}
        assert all(name.count("/") == 1 for name in [*entry["targets"], entry.get("repo", "a/b")])
        assert entry["source"].startswith("https://") or (ROOT / entry["source"]).is_file()
        if "folder" in entry:
            made: DrafterConfig = Drafter.from_pretrained(ROOT / "hub_configs" / entry["folder"]).config
            assert made.target == {k: v for k, v in entry["like"].items() if k in made.target} | {
                "name": entry["targets"][0]
            }
    pairs = [(target, entry.name) for entry in known.index() for target in entry.targets]
    assert len(set(pairs)) == len(pairs)


def test_the_ready_drafter_of_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over weights of one layer, as large as the real ones."""
    real = next(entry for entry in known.index() if entry.folder == "hybrid")
    sizes = {name: real.like[name] for name in known.SIZES}
    config = tf.LlamaConfig(
        **sizes, num_attention_heads=9, num_key_value_heads=3, intermediate_size=8, pad_token_id=2, eos_token_id=None
    )
    assert real.fits(SimpleNamespace(config=config))
    config.num_hidden_layers = 1
    one = dataclasses.replace(real, like=real.like | {"num_hidden_layers": 1})
    monkeypatch.setattr(known, "index", lambda: (one,))
    target = tf.LlamaForCausalLM(config).eval()
    target.config.name_or_path = real.targets[0]
    drafter, note = speculated(target)
    assert isinstance(drafter, HybridDrafter) and drafter.draft_model.num_parameters() > 10_000_000
    assert f"(hub_configs/hybrid): known for {real.targets[0]}" in note
    monkeypatch.setattr(choosing, "ready_folder", lambda name: None)  # as of an installed wheel
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        drafter, note = speculated(target)
    assert drafter.draft_model is None and "left out" not in note and "nothing else is at hand" in note
