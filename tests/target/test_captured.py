"""Forwards over static buffers: recorded once and replayed, they give plain decoding's text.

On a CPU nothing is recorded, and steps simply run; `traced` records them as a GPU would.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import models
import pytest
import torch
from captured_calls import CAPTURED, DRAFTERS, come_and_go, decode
from compare import sequences_of, uneven_eos
from torch import Tensor
from traced import Traced, traced
from transformers import DynamicCache, StaticCache

import hf_specdec
from hf_specdec import DraftModelDrafter, PromptLookupDrafter
from hf_specdec.protocol import Forward
from hf_specdec.target import buffers, capturable, captured, captured_cache, shelf
from hf_specdec.target import recorded as recording
from hf_specdec.target.buffers import power_of_two
from hf_specdec.target.capturable import wants_captured, why_not_captured
from hf_specdec.target.captured import CapturedRunner
from hf_specdec.target.captured_cache import CapturedLayer
from hf_specdec.target.fingerprint import fingerprint
from hf_specdec.target.inputs import CACHE, position_limit
from hf_specdec.target.probe import Support, support
from hf_specdec.target.ragged import RaggedRunner
from hf_specdec.target.shelf import shelf_of

pytestmark = pytest.mark.real_time  # the other clocks are moved by a model's forwards, and a replay makes none
CHAIN = 5
"""draft steps that are recorded as one, at most"""
RAGGED = [name for name in models.ARCHITECTURES if name not in ("Mamba", "Qwen3-Next", "LFM2")]


@pytest.fixture(params=[False, True], ids=["run", "replayed"])
def recorded(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both ways: as on a CPU, and as on a GPU."""
    if not request.param:
        yield False
        return
    with traced():
        yield True


def built(name: str) -> Any:
    """With fast attention, where it has that."""
    try:
        return models.build(name, "sdpa")
    except ValueError:
        return models.build(name, "eager")


# ---------------------------------------------------------------------- one text


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", RAGGED)
def test_greedy_text_is_plain_decodings(name: str, kind: str, lengths: list[int]) -> None:
    is_plain(name, kind, lengths)


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT-2", "Phi-3"])
def test_greedy_text_that_is_replayed_is_plain_decodings(name: str, kind: str, lengths: list[int]) -> None:
    with traced():
        is_plain(name, kind, lengths)
        assert Traced.played


def is_plain(name: str, kind: str, lengths: list[int]) -> None:
    model, draft = built(name), models.llama(seed=1)
    drafter = DRAFTERS[kind](draft)
    plain = decode(model, None, lengths)
    assert torch.equal(decode(model, drafter, lengths, speculation=CAPTURED), plain)
    assert not any("dropped" in note for note in drafter.last_stats.notes)


def test_what_was_recorded_is_replayed_in_later_calls() -> None:
    model = models.llama()
    drafter = DraftModelDrafter(models.llama(seed=1), num_draft_tokens=4)
    texts = [[9], [12], [5]]
    plain = [decode(model, None, lengths) for lengths in texts]
    with traced():
        assert torch.equal(decode(model, drafter, texts[0], speculation=CAPTURED), plain[0])
        first = Traced.recorded
        assert first > 0
        for lengths, expected in zip(texts[1:], plain[1:], strict=True):
            assert torch.equal(decode(model, drafter, lengths, speculation=CAPTURED), expected)
        assert Traced.recorded < 4 * first < Traced.played  # prompts, and another width may come up
    assert all(kept.free for kept in shelf_of(model).kept)


@pytest.mark.parametrize("drafter", [None, PromptLookupDrafter()])
def test_a_warm_up_records_prompts_of_all_lengths(drafter: PromptLookupDrafter | None) -> None:
    """That are read into the same buffers, in chunks of other widths and in several."""
    model = models.llama(max_position_embeddings=2048)
    call = {"max_new_tokens": 20, "do_sample": False, "speculation": CAPTURED}
    with traced():
        hf_specdec.warm_up(model, drafter, **models.prompts([400]), **call)
        before = Traced.recorded
        for length in (520, 600, 700):
            for _ in range(recording.MET):
                decode(model, drafter or PromptLookupDrafter(), [length], **call)
        assert Traced.recorded == before


@pytest.mark.parametrize("make", [lambda draft: PromptLookupDrafter(), DRAFTERS["fixed"]])
def test_after_a_warm_up_nothing_is_recorded(make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CHUNKS", captured.CHUNKS[:1])  # of the prompt's widths
    model, drafter = models.llama(), make(models.llama(seed=1))
    plain = decode(model, None, [9], max_new_tokens=100)
    call = {"max_new_tokens": 100, "do_sample": False, "speculation": CAPTURED}
    with traced():
        said = hf_specdec.warm_up(model, drafter, **models.prompts([5]), **call)
        before = Traced.recorded
        assert f"recorded {before} forwards" in said and before >= 2 * len(buffers.WIDTHS) - 2
        assert torch.equal(decode(model, drafter, [9], max_new_tokens=100, speculation=CAPTURED), plain)
        assert Traced.recorded == before


def test_a_warm_up_says_why_nothing_was_recorded() -> None:
    model = models.llama()
    assert "only a GPU records" in hf_specdec.warm_up(model, **models.prompts([5]), speculation=CAPTURED)
    model.model.norm = Asks(model.model.norm)
    assert "does not run without values" in hf_specdec.warm_up(model, **models.prompts([5]), speculation=CAPTURED)
    with pytest.raises(hf_specdec.SpeculationError, match="an example of a call"):
        hf_specdec.warm_up(model)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT-2"])
@pytest.mark.parametrize(
    "lengths",
    [[3], [64], [65], [600], [9, 4, 7], [150, 90, 3], [2, 1] * 300],
    ids=lambda rows: f"{len(rows)} of {max(rows)}",
)
def test_a_recorded_prompt_gives_what_an_eager_one_does(name: str, lengths: list[int]) -> None:
    model, inputs = built(name), models.prompts(lengths)
    if max(lengths) > position_limit(model):
        pytest.skip("longer than the model's positions")

    def prompt(kind: type[RaggedRunner]) -> tuple[RaggedRunner, Forward]:
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        given = {"attention_mask": mask, "position_ids": positions, CACHE: DynamicCache(config=model.config)}
        runner = kind(model, given, ids)
        runner.features = (1, -1)
        return runner, runner.prefill()

    ids = inputs["input_ids"]
    with torch.no_grad(), traced():
        plain, expected = prompt(RaggedRunner)
        first = None
        for _ in range(3):
            played, (runner, found) = Traced.played, prompt(CapturedRunner)
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)
            first = found.logits if first is None else first
            assert torch.equal(found.logits, first), "whoever asks again gets the same text, in half precision, too"
            for feature, states in expected.features.items():
                seen = inputs["attention_mask"].bool()
                torch.testing.assert_close(found.features[feature][seen], states[seen], atol=1e-5, rtol=1e-4)
            assert runner.lengths == plain.lengths and runner.columns == plain.columns
            nexts = [each.forward(ids[:, :5]).logits for each in (runner, plain)]
            torch.testing.assert_close(*nexts, atol=1e-4, rtol=1e-4)
            plain.truncate([plain.columns] * len(lengths))
    assert Traced.played > played, "the last prompt was replayed"


def test_calls_that_are_replayed_run_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target nor the draft, not even for the prompt."""
    model, draft = models.llama(), models.llama(seed=1)
    drafter, forwards, run = DRAFTERS["fixed"](draft), [], type(model).__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards.append(self)
        return run(self, *args, **kwargs)

    plain = decode(model, None, [9, 4, 7])
    with traced():
        for _ in range(4):
            decode(model, drafter, [9, 4, 7], speculation=CAPTURED)
        monkeypatch.setattr(type(model), "__call__", noted)
        assert torch.equal(decode(model, drafter, [9, 4, 7], speculation=CAPTURED), plain)
    assert not forwards


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]])
def test_a_text_outgrows_its_buffers(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_AHEAD", 1)
    monkeypatch.setattr(buffers, "FEWEST", 16)
    model = models.llama()
    drafter = PromptLookupDrafter()
    plain = decode(model, None, lengths, max_new_tokens=300)
    assert torch.equal(decode(model, drafter, lengths, max_new_tokens=300, speculation=CAPTURED), plain)
    sizes = {kept.slots for kept in shelf_of(model).kept}
    assert sizes == {256, 512}


@pytest.mark.parametrize("kind", ["lookup, branches", "fixed", "hybrid, fixed"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_forwards_look_at_what_is_there(name: str, kind: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at no more than as many slots again; each number of them has recordings of its own."""
    monkeypatch.setattr(buffers, "FEWEST", 16)
    looked: set[tuple[int, int]] = set()

    class Layer(CapturedLayer):
        def update(self, keys: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            found = super().update(keys, *given, **more)
            looked.add((max(self.slots.lengths) + keys.shape[2], found[0].shape[2]))
            return found

    model, drafter = built(name), DRAFTERS[kind](models.llama(seed=1))
    plain = decode(model, None, [9, 4], max_new_tokens=150)
    assert not why_not_captured(model)  # a trial is not counted
    monkeypatch.setattr(captured_cache, "CapturedLayer", Layer)
    for _ in range(3):
        assert torch.equal(decode(model, drafter, [9, 4], max_new_tokens=150, speculation=CAPTURED), plain)
    assert all(there <= seen <= max(16, 2 * (there + CHAIN)) for there, seen in looked)
    assert {seen for _, seen in looked} >= {16, 32, 64, 128}
    assert 512 in {kept.slots for kept in shelf_of(model).kept}


def test_a_warm_up_serves_texts_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "FEWEST", 16)
    model, drafter, call = models.llama(), PromptLookupDrafter(), {"max_new_tokens": 90, "do_sample": False}
    plain = [decode(model, None, lengths, **call) for lengths in ([9], [30])]
    with traced():
        hf_specdec.warm_up(model, drafter, **models.prompts([20]), **call, speculation=CAPTURED)
        before = Traced.recorded
        assert before <= recording.MOST_RECORDED
        for lengths, expected in zip(([9], [30]), plain, strict=True):
            assert torch.equal(decode(model, drafter, lengths, speculation=CAPTURED, **call), expected)
        assert Traced.recorded == before


def test_rows_leave(recorded: bool) -> None:
    """Rows that have ended make room: buffers for five rows, then for fewer."""
    model, lengths = models.llama(), [9, 4, 7, 2, 6]
    ends = uneven_eos(model, lengths, at=(4, 9, 15))
    plain = decode(model, None, lengths, eos_token_id=ends)
    drafter = PromptLookupDrafter()
    assert torch.equal(decode(model, drafter, lengths, eos_token_id=ends, speculation=CAPTURED), plain)
    assert len({kept.rows for kept in shelf_of(model).kept}) > 1
    assert all(kept.rows == power_of_two(kept.rows) for kept in shelf_of(model).kept)


@pytest.mark.parametrize("window", [64, 100])
def test_drafts_are_no_wider_than_the_widest_recorded_forward(window: int, recorded: bool) -> None:
    model = models.llama()
    drafter = DraftModelDrafter(model, num_draft_tokens=window)
    plain = decode(model, None, [9], max_new_tokens=150)
    assert torch.equal(decode(model, drafter, [9], max_new_tokens=150, speculation=CAPTURED), plain)
    assert max(drafter.last_stats.verify_widths) == buffers.WIDEST


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]])
def test_the_cache_that_is_returned_is_plain_decodings(lengths: list[int], recorded: bool) -> None:
    model = models.llama()
    settings: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    plain = decode(model, None, lengths, **settings)
    ours = decode(model, PromptLookupDrafter(), lengths, **settings, speculation=CAPTURED)
    assert torch.equal(sequences_of(ours), sequences_of(plain))
    exact = torch.stack(decode(deepcopy(model).double(), None, lengths, **settings).scores)
    errors = [(torch.stack(output.scores) - exact).abs().max() for output in (plain, ours)]
    assert errors[1] < 4 * errors[0], "what plain decoding's own rounding comes to differs from CPU to CPU"
    mask = models.prompts(lengths)["attention_mask"].bool()
    for mine, theirs in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        seen = torch.nn.functional.pad(mask, (0, theirs.keys.shape[2] - mask.shape[1]), value=True)  # not the padding
        keys = [layer.keys.transpose(1, 2)[seen] for layer in (mine, theirs)]
        torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}, {"no_repeat_ngram_size": 2}]
)
def test_draws_are_those_of_eager_forwards(settings: dict[str, Any], recorded: bool) -> None:
    """Of a fixed schedule: the same seed, the same window, the same numbers."""
    model, texts = models.llama(), []
    for forwards in ("eager", "captured"):
        torch.manual_seed(7)
        drafter = DraftModelDrafter(models.llama(seed=1), num_draft_tokens=4)
        texts.append(decode(model, drafter, [9, 4], do_sample=True, **settings, speculation={"forwards": forwards}))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["lookup", "fixed", "hybrid"])
def test_rows_that_come_and_go(kind: str) -> None:
    come_and_go(models.llama(), DRAFTERS[kind](models.llama(seed=1)))


def test_a_batch_decoder_has_one_way_for_all_requests() -> None:
    with pytest.raises(hf_specdec.SpeculationError, match="forwards must be"):
        hf_specdec.BatchDecoder(models.llama(), forwards="fast")
    refused = pytest.raises(hf_specdec.SpeculationError, match="not taken per request")
    with hf_specdec.BatchDecoder(models.llama(), PromptLookupDrafter()) as decoder, refused:
        decoder.submit([1, 2, 3], max_new_tokens=4, speculation={"forwards": "captured"})


def test_a_batch_decoder_says_why_nothing_is_captured() -> None:
    model = models.llama()
    model.model.layers[0].register_forward_hook(models.spy(lambda *_: None))
    with hf_specdec.BatchDecoder(model, forwards="captured") as decoder:
        assert "forwards are not captured: LlamaForCausalLM has hooks" in decoder.stats.notes[0]


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
def test_a_static_cache_that_is_asked_for_is_captured(lengths: list[int]) -> None:
    """A dynamic one stands in for it, whose rows lie in static buffers."""
    model, drafter = models.llama(), DRAFTERS["fixed"](models.llama(seed=1))
    plain = decode(model, None, lengths, cache_implementation="static")
    with traced():
        text = decode(model, drafter, lengths, cache_implementation="static", speculation=CAPTURED)
        assert Traced.played
    assert torch.equal(text, plain)
    assert not [note for note in drafter.last_stats.notes if "not captured" in note]


def test_a_static_cache_of_the_users_is_filled_from_the_buffers() -> None:
    """It goes on from there in the next call, captured or not."""
    model, drafter, texts = models.llama(), DRAFTERS["fixed"](models.llama(seed=1)), []
    for speculation in ({}, {"assistant_model": drafter, "speculation": CAPTURED}):
        cache, ids = StaticCache(model.config, max_cache_len=128), models.prompts([9])["input_ids"]
        for _ in range(2):
            ids = model.generate(ids, max_new_tokens=20, do_sample=False, **{CACHE: cache}, **speculation)
            ids = torch.cat([ids, ids[:, :2]], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)


def test_a_compiled_forward_is_not_recorded() -> None:
    model = models.llama()
    model.forward = torch.compile(model.forward, backend="eager")
    with traced():
        text = decode(model, PromptLookupDrafter(), [9], speculation=CAPTURED)
        assert not Traced.played
    assert torch.equal(text, decode(models.llama(), None, [9]))


def test_long_windows_are_drawn_as_by_eager_forwards(recorded: bool) -> None:
    """They are recorded in parts, whose numbers are those of their places."""
    model, texts = models.llama(), []
    for forwards, window in (("eager", buffers.WIDEST - 1), ("captured", 100), ("captured", 100)):
        torch.manual_seed(7)
        drafter = DraftModelDrafter(model, num_draft_tokens=window)
        call = {"do_sample": True, "max_new_tokens": 150, "speculation": {"forwards": forwards}}
        texts.append(decode(model, drafter, [9], **call))
        assert not any("dropped" in note for note in drafter.last_stats.notes)
        assert max(drafter.last_stats.verify_widths) == buffers.WIDEST
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[1], texts[2])


# ---------------------------------------------------------------------- what a replay would not notice


def test_values_that_are_no_numbers_do_not_outlive_their_call(recorded: bool) -> None:
    model = models.llama()
    plain = decode(model, None, [9])
    decode(model, PromptLookupDrafter(), [9], speculation=CAPTURED)
    for kept in shelf_of(model).kept:
        for states in (*kept.keys, *kept.values):
            states.fill_(float("nan"))
    assert torch.equal(decode(model, PromptLookupDrafter(), [9], speculation=CAPTURED), plain)


def _other_weights(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())


def _another_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [_other_weights, _another_attention])
def test_a_model_that_was_changed_is_recorded_anew(change: Callable[[Any], None]) -> None:
    model, drafter = models.llama(), PromptLookupDrafter()
    with traced():
        decode(model, drafter, [9], speculation=CAPTURED)
        before = shelf_of(model).kept
        change(model)
        plain = decode(model, None, [9])
        assert torch.equal(decode(model, drafter, [9], speculation=CAPTURED), plain)
        assert not set(map(id, before)) & set(map(id, shelf_of(model).kept))


def test_a_model_that_was_asked_for_hidden_states_stays_what_it_was() -> None:
    """transformers leaves hooks in it, which only note states."""
    model, drafter = models.llama(), PromptLookupDrafter()
    before = fingerprint(model)
    model(**models.prompts([9]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert fingerprint(model) == before and not why_not_captured(model)
    plain = decode(model, None, [9])
    with traced():
        assert torch.equal(decode(model, drafter, [9], speculation=CAPTURED), plain)
        assert Traced.played


def test_calls_that_run_at_once_share_no_buffers() -> None:
    """The second is started from within the first, by its streamer."""
    model = models.llama()
    plain = [decode(model, None, [9]), decode(model, None, [5])]
    inner: list[Tensor] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            if not inner:
                inner.append(decode(model, PromptLookupDrafter(), [5], speculation=CAPTURED))

        def end(self) -> None:
            """The text is over."""

    with traced():
        outer = decode(model, PromptLookupDrafter(), [9], speculation=CAPTURED, streamer=Streamer())
    assert torch.equal(outer, plain[0]) and torch.equal(inner[0], plain[1])


# ---------------------------------------------------------------------- what cannot be recorded


class Asks(torch.nn.Module):
    """Looks at what it is given, which a recording cannot."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states if states.sum().item() != 1e9 else -states)


def test_a_forward_that_asks_the_device_is_not_recorded() -> None:
    model = models.llama()
    model.model.norm = Asks(model.model.norm)
    drafter = PromptLookupDrafter()
    assert torch.equal(decode(model, drafter, [9], speculation=CAPTURED), decode(model, None, [9]))
    assert any("does not run without values" in note for note in drafter.last_stats.notes)


def _scaled(model: Any) -> dict[str, Any]:
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return {}


def _hooked(model: Any) -> dict[str, Any]:
    model.model.norm.register_forward_hook(models.spy(lambda module, args, output: output.flip(-1)))
    return {}


def _replaced(model: Any) -> dict[str, Any]:
    model.forward = functools.wraps(model.forward)(functools.partial(type(model).forward, model))
    return {}


WHY: dict[str, Callable[[Any], dict[str, Any]]] = {
    "returns hidden states": lambda model: {"output_hidden_states": True, "return_dict_in_generate": True},
    "rotary embeddings (dynamic)": _scaled,
    "has hooks": _hooked,
    "has a forward that was replaced": _replaced,
}


@pytest.mark.parametrize("why", WHY)
def test_a_call_says_why_its_forwards_are_not_captured(why: str) -> None:
    model, drafter = models.llama(), PromptLookupDrafter()
    settings = WHY[why](model)
    ours = decode(model, drafter, [9], **settings, speculation=CAPTURED)
    assert torch.equal(sequences_of(ours), sequences_of(decode(model, None, [9], **settings)))
    assert any(why in note for note in drafter.last_stats.notes)


@pytest.mark.grid
@pytest.mark.parametrize("name", RAGGED)
def test_forwards_run_without_values(name: str) -> None:
    """All but mixtures of experts in float32, whose kernel exists in bfloat16 only."""
    model = built(name)
    if support(model) is Support.RAGGED:
        why = why_not_captured(model)
        assert not why or "Expected inputs of BF16 type" in why


def test_a_step_that_cannot_be_recorded_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = models.llama(), PromptLookupDrafter()

    def fails(self: Any, step: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Traced, "__call__", fails)
    with traced(), pytest.warns(hf_specdec.SpeculationWarning, match=r"a forward is not recorded.*out of memory"):
        ours = decode(model, drafter, [9], speculation=CAPTURED)
    assert torch.equal(ours, decode(model, None, [9]))


def test_a_draft_that_fails_in_the_middle_of_its_recording_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its steps have been made by then."""
    model = models.llama()
    drafter, plain = DraftModelDrafter(model, num_draft_tokens=4), decode(model, None, [9])
    record, read, left = Traced.__call__, captured.Captured.read, []

    def reading(self: Any, *args: Any, **inputs: Any) -> Any:
        if left and not left.pop():
            raise torch.OutOfMemoryError("out of memory")
        return read(self, *args, **inputs)

    def recording(self: Any, step: Any) -> Any:
        left[:] = [False, True, True]
        try:
            return record(self, step)
        finally:
            left.clear()

    monkeypatch.setattr(captured.Captured, "read", reading, raising=False)
    monkeypatch.setattr(Traced, "__call__", recording)
    with traced(), pytest.warns(hf_specdec.SpeculationWarning, match="a forward is not recorded"):
        ours = decode(model, drafter, [9], speculation=CAPTURED)
    assert torch.equal(ours, plain) and drafter.last_stats.alpha == 1


def test_buffers_are_kept_for_few_shapes() -> None:
    model = models.llama()
    for rows in range(1, 2 * shelf.MOST_KEPT + 2):
        decode(model, PromptLookupDrafter(), [5] * rows, max_new_tokens=8, speculation=CAPTURED)
    assert len(shelf_of(model).kept) <= shelf.MOST_KEPT


def test_what_is_kept_takes_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """The last ones used, of all models together; a call's own may take more while it goes on."""
    monkeypatch.setattr(shelf, "_shelves", weakref.WeakKeyDictionary())
    models_, plain = [models.llama(), models.llama(seed=1)], decode(models.llama(), None, [9])
    drafter = DraftModelDrafter(models_[1], num_draft_tokens=4)

    def held(share: float) -> list[int]:
        """Sets of either model after calls of one, two and four rows."""
        monkeypatch.setattr(shelf, "free_bytes", lambda device: share * one / shelf.SHARE - shelf.held_bytes())
        for rows in (4, 2, 1):
            said = decode(models_[0], drafter, [9] * rows, speculation=CAPTURED)
            assert torch.equal(said[:1], plain)
            assert drafter.last_stats.held_bytes <= share * one
        return [len(shelf_of(model).kept) for model in models_]

    one = 1 << 40
    assert held(1.0) == [3, 3]
    one = max(kept.num_bytes for kept in shelf_of(models_[0]).kept if kept.rows == 1)
    assert held(2.5) == [1, 1] and held(1.5) == [0, 1] and held(0.5) == [0, 0]


def test_a_model_that_is_released_holds_nothing(recorded: bool) -> None:
    model, draft = models.llama(), models.llama(seed=1)
    before, drafter = shelf.held_bytes(), DraftModelDrafter(draft, num_draft_tokens=4)
    text = decode(model, drafter, [9], speculation=CAPTURED)
    left = [weakref.ref(kept) for each in (model, draft) for kept in shelf_of(each).kept]
    sizes = [sum(kept.num_bytes for kept in shelf_of(each).kept) for each in (model, draft)]
    assert drafter.last_stats.held_bytes == before + sum(sizes) and min(sizes) > 0
    hf_specdec.release(model)
    assert shelf.held_bytes() == before + sizes[1]
    hf_specdec.release(draft)
    gc.collect()
    assert shelf.held_bytes() == before and not any(kept() for kept in left)
    assert torch.equal(decode(model, drafter, [9], speculation=CAPTURED), text)


def test_a_model_that_counts_the_columns_of_its_cache_is_not_captured() -> None:
    """GPT-Neo's windows are a table over columns: over static buffers their number is always the same."""
    assert "over static buffers" in why_not_captured(models.build("GPT-Neo", "eager"))


def test_buffers_that_are_borrowed_again_hold_no_row() -> None:
    """Else a padded row would stand where a longer text's once stood, and be written behind the end of the slots."""
    model = models.llama()
    model.generate(
        **models.prompts([9, 4, 7]), max_new_tokens=20, do_sample=False, pad_token_id=0,
        assistant_model=PromptLookupDrafter(), speculation={"forwards": "captured"},
    )  # fmt: skip
    mine = shelf_of(model)
    used = mine.kept[0]
    like = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**models.prompts([3]), **{CACHE: like})
    again = mine.borrow(like, used.rows, used.slots, used.device, mine.state)
    assert again is used and not used.ends.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_itself_all_but_float16_is_captured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a rejected token may overflow, and spoil its row from behind a mask."""
    monkeypatch.setattr(capturable, "BY_ITSELF", ("cpu",))
    model = models.llama().to(dtype)
    assert wants_captured("auto", model) == (dtype != torch.float16) and wants_captured("captured", model)
