"""Gemma 4's assistants: what a draft is made of, published files, and what cannot be served. Their texts and batches
are in `test_heads.py` and `test_head_trees.py`, too."""

from pathlib import Path
from typing import Any

import gemma4_models
import models
import pytest
import torch
import transformers as tf
from gemma4_models import DRAFTED, OF_TARGETS, drafted_by_transformers, folder_of, gemma4, pair
from head_pairs import drafting_goes_on
from heads_alone import logits_drafted_from
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from traced import Traced, traced

from hf_specdec import BatchDecoder, Drafter, DraftModelDrafter, Gemma4Drafter, HybridDrafter, SpeculationError
from hf_specdec.target.shelf import shelf_of

__all__ = ["drafting_goes_on"]
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}


WAYS: dict[str, dict[str, Any]] = {
    "rows of any lengths": {},
    "captured": {"speculation": {"forwards": "captured"}},
    "in lockstep": {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OF_TARGETS)
def test_logits_are_transformers_own(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each text, those that transformers' own loop makes where it has read that text and nothing else. It gives
    all tokens outside the likeliest groups one number, which depends on the others; here they have the lowest."""
    (target, drafter), found = gemma4(kind), logits_drafted_from(monkeypatch)
    target.generate(**models.prompts([9]), **CALL, **WAYS[way], assistant_model=drafter)
    assert drafter.last_stats is not None and drafter.last_stats.mode == (
        "lockstep" if way == "in lockstep" else "ragged"
    )
    assert len(found) > 5 and max(len(logits) for _, logits in found) == DRAFTED
    for text, logits in found:
        drafted, expected = drafted_by_transformers(target, drafter.draft_model, torch.tensor([text]), DRAFTED)
        assert [int(each.argmax()) for each in logits] == drafted[: len(logits)]
        for ours, theirs in zip(logits, expected, strict=False):
            scored = ours > torch.finfo(ours.dtype).min
            assert int(scored.sum()) == (gemma4_models.SCORED if kind == "E2B" else len(ours))
            torch.testing.assert_close(ours[scored], theirs[scored], rtol=1e-4, atol=1e-4)
            assert bool((theirs[~scored] < theirs[scored].min()).all())


@pytest.mark.parametrize(("images", "mode"), [(0, "ragged"), (1, "lockstep")])
def test_what_processors_of_models_that_see_add(images: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say which tokens are images. Where none is that says nothing."""
    (target, drafter), found = gemma4("E2B"), logits_drafted_from(monkeypatch)
    inputs = models.prompts([9]) | {"mm_token_type_ids": torch.full((1, 9), images)}
    ours = target.generate(**inputs, **CALL, assistant_model=drafter)
    assert torch.equal(ours, target.generate(**inputs, **CALL))
    assert drafter.last_stats is not None and drafter.last_stats.mode == mode and found
    for text, logits in found:
        drafted, _ = drafted_by_transformers(target, drafter.draft_model, torch.tensor([text]), DRAFTED)
        assert [int(each.argmax()) for each in logits] == drafted[: len(logits)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [[9], [3, 11, 6, 8]], ids=str)
def test_greedy_text_is_the_targets(lengths: list[int], way: str) -> None:
    """By each runner; rows that keep equal lengths, too, some with padding."""
    target, drafter = gemma4("E2B")
    inputs = models.prompts(lengths) | CALL
    plain = target.generate(**inputs)
    ours = target.generate(**inputs, **WAYS[way], assistant_model=drafter)
    assert torch.equal(getattr(ours, "sequences", ours), plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


def test_a_continued_cache() -> None:
    """What it holds the assistant has not seen."""
    target, drafter = gemma4("E2B")
    first = target.generate(**models.prompts([9]), **CALL, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    ids = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    plain = target.generate(ids, **CALL)
    ours = target.generate(ids, **CALL, past_key_values=cache, assistant_model=drafter)
    assert torch.equal(ours, plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", OF_TARGETS)
def test_drafts_are_recorded(kind: str) -> None:
    target, drafter = gemma4(kind)
    plain = target.generate(**models.prompts([9, 4]), **CALL)
    with traced():
        ours = target.generate(
            **models.prompts([9, 4]), **CALL, assistant_model=drafter, speculation={"forwards": "captured"}
        )
        assert Traced.recorded > 1 and shelf_of(drafter.draft_model).kept
    assert torch.equal(ours, plain)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    return gemma4_models.small(VOCAB)


@pytest.mark.grid
@pytest.mark.parametrize("copies", [False, True], ids=["alone", "with copies"])
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_has_the_targets_distribution(small: Any, settings: str, copies: bool) -> None:
    """The power is that of test_distribution's tests."""
    (target, assistant), (told, processors) = small, SETTINGS[settings]
    head = Gemma4Drafter(assistant, num_draft_tokens=2)
    drafter: Any = HybridDrafter(head) if copies else head
    counts = sample(target, drafter, FEWER, **told)
    assert drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(target, processors)) > LEVEL


# ------------------------------------------------------------------ files


def test_a_published_assistant_loads_as_it_is() -> None:
    target, assistant = pair("E2B")
    plain = target.generate(**models.prompts([9]), **CALL)
    drafter = Drafter.from_pretrained(folder_of("E2B"))
    assert isinstance(drafter, Gemma4Drafter) and drafter.most == 4
    for name, weight in assistant.state_dict().items():
        assert torch.equal(drafter.draft_model.state_dict()[name], weight)
    asked: list[dict[str, Any]] = [
        {"assistant_model": drafter},
        {"assistant_model": HybridDrafter(drafter)},
        {"assistant_model": assistant, "speculation_type": "gemma4"},
        {"assistant_model": assistant, "speculation_type": "hybrid"},
        {"speculation_type": "gemma4", "speculation": {"drafter": str(folder_of("E2B")), "num_draft_tokens": 2}},
    ]
    for one in asked:
        assert torch.equal(target.generate(**models.prompts([9]), **CALL, **one), plain)
    assert Gemma4Drafter.from_pretrained(folder_of("E2B"), dtype="bfloat16").draft_model.dtype == torch.bfloat16


@pytest.mark.parametrize(("said", "most"), [(6, 6), (64, 16), (None, 4)])
def test_how_many_tokens_it_was_published_with(said: int | None, most: int, tmp_path: Path) -> None:
    """And a number that the user sets comes before that."""
    pair("31B")[1].save_pretrained(tmp_path)
    if said is not None:
        tf.GenerationConfig(num_assistant_tokens=said).save_pretrained(tmp_path)
    assert Drafter.from_pretrained(tmp_path).most == most
    assert Drafter.from_pretrained(tmp_path, num_draft_tokens=3).most == 3


@pytest.mark.parametrize("kind", OF_TARGETS)
def test_a_saved_drafter_is_loaded(kind: str, tmp_path: Path) -> None:
    target, head = gemma4(kind)
    head.save_pretrained(tmp_path / "alone", target=target)
    HybridDrafter(head).save_pretrained(tmp_path / "hybrid", target=target)
    plain = target.generate(**models.prompts([9]), **CALL)
    for name in ("alone", "hybrid"):
        loaded = Drafter.from_pretrained(tmp_path / name)
        assert torch.equal(target.generate(**models.prompts([9]), **CALL, assistant_model=loaded), plain)
        assert loaded.last_stats is not None and loaded.last_stats.draft_calls > 0


def test_packed_weights_and_a_quantization() -> None:
    target, inputs = pair("E2B")[0], models.prompts([9]) | CALL
    packed = Drafter.from_pretrained(folder_of("E2B"), pack_linear=True)
    assert torch.equal(target.generate(**inputs, assistant_model=packed), target.generate(**inputs))
    assert packed.last_stats is not None and packed.last_stats.drafted_tokens > 0
    with pytest.raises(SpeculationError, match="quantization='int8' is for draft models"):
        Drafter.from_pretrained(folder_of("E2B"), quantization="int8")


def test_pickles_are_refused(tmp_path: Path) -> None:
    pair("E2B")[1].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(SpeculationError, match="pickle"):
        Drafter.from_pretrained(tmp_path)


# ------------------------------------------------------------------ what cannot be served


def test_another_target() -> None:
    (_, head), ids = gemma4("E2B"), models.prompts([5])
    others: dict[str, tuple[Any, str]] = {
        "no keys": (models.llama(), "looks at keys and values that the target does not tell"),
        "other heads": (gemma4("31B")[0], r"keys of full_attention of .* \(2, 16\), while the target's are \(1, 16\)"),
        "wider": (gemma4_models.target("E2B", hidden_size=64), "reads states of width 32, and .* of width 64"),
        "more tokens": (gemma4_models.target("E2B", vocab_size=112), "knows 98 tokens, and .* 112 tokens"),
    }
    for target, message in others.values():
        with pytest.raises(SpeculationError, match=message):
            target.generate(**ids, max_new_tokens=3, assistant_model=head)
        with pytest.raises(SpeculationError, match=message):
            BatchDecoder(target, HybridDrafter(head))


def test_it_is_no_draft_model() -> None:
    target, assistant = pair("E2B")
    with pytest.raises(SpeculationError, match="not by itself; use Gemma4Drafter or HybridDrafter"):
        DraftModelDrafter(assistant)
    for kind in ("draft_model", "pearl", "disco"):
        with pytest.raises(SpeculationError, match="use Gemma4Drafter"):
            target.generate(**models.prompts([5]), **CALL, assistant_model=assistant, speculation_type=kind)
    with pytest.raises(SpeculationError, match="LlamaForCausalLM is not an assistant of Gemma 4"):
        Gemma4Drafter(models.llama())


def test_without_a_drafter_it_is_transformers_own() -> None:
    target, assistant = pair("31B")
    plain = target.generate(**models.prompts([9]), **CALL)
    assistant.generation_config.num_assistant_tokens = 3  # as published ones have it; transformers has no default
    try:
        assert torch.equal(target.generate(**models.prompts([9]), **CALL, assistant_model=assistant), plain)
    finally:
        assistant.generation_config.num_assistant_tokens = None
