"""A target over two devices, as `device_map` spreads it: nothing meets what lies elsewhere, and the text is plain's."""

import threading
from collections.abc import Iterator
from typing import Any

import dflash_models
import each_kind
import encoder_decoders
import head_pairs
import models
import mtp_heads
import pytest
import stream_models
import torch
from accelerate import dispatch_model
from pretended_devices import Placed, pretended_devices
from transformers import DynamicCache

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    PromptLookupDrafter,
)
from hf_specdec.target.inputs import CACHE


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In all threads."""
    run = threading.Thread.run

    def within(self: threading.Thread) -> None:
        with pretended_devices():
            run(self)

    monkeypatch.setattr(threading.Thread, "run", within)
    with pretended_devices():
        yield


def spread(model: Any, first: int = 1) -> Any:
    """The lower layers on one device, the upper ones with what comes behind them on the next."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    places: dict[str, int] = {}
    for name, part in model.named_modules():
        within = any(name.startswith(f"{layer}.") for layer in places)
        if isinstance(part, torch.nn.ModuleList) and len(part) == count and not within:
            places |= {f"{name}.{i}": first + (i >= count // 2) for i in range(count)}
    for name, part in model.named_modules():
        held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if held and not any(name.startswith(f"{layer}.") for layer in places):
            places[name] = first + any(word in name for word in ("head", "norm", "ln_f"))
    if "" in places:  # of the model itself; only tensors may be named without what is below
        del places[""]
        places |= {name: first + 1 for name, _ in model.named_buffers(recurse=False)}
    return dispatch_model(model, {name: f"cpu:{index}" for name, index in places.items()}, force_hooks=True)


def test_what_lies_apart_does_not_meet() -> None:
    a, b = (torch.ones(3, device=f"cpu:{index}") for index in (1, 2))
    assert isinstance(a, Placed) and a.device != b.device and (a + a).device == a.device
    assert (a + b.to(a.device)).tolist() == [2, 2, 2] and a[torch.tensor([0])].device == a.device
    for other in (b, torch.ones(3)):
        with pytest.raises(RuntimeError, match="wants tensors of one device"):
            a + other
    model = spread(models.llama())
    assert {parameter.device.index for parameter in model.parameters()} == {1, 2}


MAKES = {kind: make for kind, make in each_kind.MAKES.items() if kind != "disco"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
ROWS = pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=["one row", "uneven rows"])


def on(model: Any, index: int) -> Any:
    return dispatch_model(model, {"": f"cpu:{index}"}, force_hooks=True)


def there(lengths: list[int]) -> dict[str, Any]:
    return {name: ids.to("cpu:1") for name, ids in models.prompts(lengths).items()}


def agree(target: Any, drafter: Any, lengths: list[int], plain: Any, **options: Any) -> None:
    """The spread target says what it did on the host, and the drafter is not dropped."""
    text = target.generate(**there(lengths), **OPTIONS | options, assistant_model=drafter)
    assert text.tolist() == plain.tolist() and str(text.device) == "cpu:1"
    stats = drafter.last_stats
    assert stats.drafted_tokens > 0 and not any("dropped" in note for note in stats.notes), stats.notes


def drafted(kind: str, where: str, lengths: list[int]) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    plain = target.generate(**models.prompts(lengths), **OPTIONS)
    places: dict[str, Any] = {"beside": lambda: on(draft, 1), "elsewhere": lambda: on(draft, 3)}
    places |= {"spread": lambda: spread(draft, 3), "host": lambda: draft}
    agree(spread(target), MAKES[kind](target, places[where]()), lengths, plain)


@pytest.mark.set_times
@pytest.mark.parametrize("kind", MAKES)
def test_the_text_is_plains(kind: str) -> None:
    drafted(kind, "spread", [7, 4])


@pytest.mark.set_times
@pytest.mark.grid
@ROWS
@pytest.mark.parametrize("where", ["beside", "elsewhere", "spread", "host"])
@pytest.mark.parametrize("kind", MAKES)
def test_wherever_the_draft_lies(kind: str, where: str, lengths: list[int]) -> None:
    drafted(kind, where, lengths)


@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GPT-2", "Bloom", "Qwen3-Next", "LFM2", "Qwen3-MoE"])
def test_other_targets(name: str, lengths: list[int]) -> None:
    """With windows, positions of their own, states and experts."""
    target = models.build(name, "eager" if name in ("Bloom", "Gemma2") else "sdpa")
    plain = target.generate(**models.prompts(lengths), **OPTIONS)
    agree(spread(target), PromptLookupDrafter(num_branches=2), lengths, plain)


@pytest.mark.set_times
@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_encoder_decoders(name: str, rows: int) -> None:
    target = encoder_decoders.build(name)
    draft, inputs = encoder_decoders.near(target, 0.05), encoder_decoders.inputs(name, rows)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = DraftModelDrafter(spread(draft, 3), num_draft_tokens=3)
    there = {name: value.to("cpu:1") for name, value in inputs.items()}
    text = spread(target).generate(**there, **OPTIONS, assistant_model=drafter)
    assert text.tolist() == plain.tolist() and drafter.last_stats.drafted_tokens > 0
    assert not any("dropped" in note for note in drafter.last_stats.notes), drafter.last_stats.notes


@pytest.mark.grid
@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize("kind", ["draft", "hybrid", "pearl"])
def test_what_is_drawn_is_the_same(kind: str, lengths: list[int]) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    options = OPTIONS | {"do_sample": True, "top_k": 20, "temperature": 0.9}

    def said(prompts: dict[str, Any]) -> Any:
        drafter = MAKES[kind](target, draft)
        torch.manual_seed(0)
        text = target.generate(**prompts, **options, assistant_model=drafter)
        assert not any("dropped" in note for note in drafter.last_stats.notes), drafter.last_stats.notes
        return text.tolist(), drafter.last_stats.drafted_tokens > 0

    before = said(models.prompts(lengths))
    spread(target), spread(draft, 3)
    assert said(there(lengths)) == before and before[1]


@pytest.mark.set_times
@ROWS
@pytest.mark.eager  # it asks for hidden states, which is another note
def test_what_a_call_may_ask_for_besides(lengths: list[int]) -> None:
    """Processors, end tokens, and all that is returned."""
    asked = ("scores", "logits", "hidden_states", "attentions")
    options = OPTIONS | {"return_dict_in_generate": True} | {f"output_{name}": True for name in asked}
    options |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": [3, 17]}
    target = models.build("Llama", "eager")
    plain = target.generate(**models.prompts(lengths), **options)
    drafter = PromptLookupDrafter(num_branches=2)
    ours = spread(target).generate(**there(lengths), **options, assistant_model=drafter)
    assert ours.sequences.tolist() == plain.sequences.tolist() and not any(map(len, drafter.last_stats.notes))
    for a, b in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(b.cpu(), a, atol=2e-3, rtol=1e-3)
    for step, (a, b) in enumerate(zip(plain.hidden_states, ours.hidden_states, strict=True)):
        assert [x.shape for x in a] == [x.shape for x in b], step


@pytest.mark.set_times
def test_a_cache_of_the_callers_is_left_as_plain_decoding_leaves_it() -> None:
    target = models.llama()
    caches = []
    for place in (models.prompts, there):
        cache = DynamicCache(config=target.config)
        drafter = PromptLookupDrafter(num_branches=2) if place is there else None
        if place is there:
            spread(target)
        target.generate(**place([7, 4]), **OPTIONS, assistant_model=drafter, **{CACHE: cache})
        caches.append([(layer.keys, layer.values) for layer in cache.layers])
    for layer, (plain, ours) in enumerate(zip(*caches, strict=True)):
        for a, b in zip(plain, ours, strict=True):
            assert str(b.device) == f"cpu:{1 + layer}"
            torch.testing.assert_close(b.cpu(), a, atol=1e-4, rtol=1e-4)


@pytest.mark.set_times
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("way", [{"prune_below": 0.02}, {"known_tokens": 40}], ids=["pruned", "known"])
def test_streams_in_such_a_target(way: dict[str, Any], name: str) -> None:
    target = stream_models.target_of(name, layers=4)
    plain = target.generate(**models.prompts([7, 4]), **OPTIONS | {"max_new_tokens": 8})
    drafter = stream_models.streams_of(target, layers=3, **way)
    drafter.streams.known.copy_(torch.arange(len(drafter.streams.known)))
    agree(spread(target), drafter, [7, 4], plain, max_new_tokens=8)


@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize("pair", ["DFlash, mixed", "GLM-4-MoE, 3"])
def test_heads_beside_such_a_target(pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    head_pairs.never_declined(monkeypatch)
    mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()
    try:
        target, drafter = head_pairs.PAIRS[pair]()
        plain = target.generate(**models.prompts(lengths), **OPTIONS)
        spread(target)
        if pair.startswith("DFlash"):
            on(drafter.draft_model, 2)
        else:
            on(drafter.model.layers, 2)
        agree(target, drafter, lengths, plain)
    finally:
        mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()


@pytest.mark.set_times
def test_requests_that_come_and_go() -> None:
    target, draft = models.llama(), models.llama(seed=3)
    plain = {n: target.generate(**models.prompts([n]), **OPTIONS)[0, n:].tolist() for n in (7, 4)}
    with BatchDecoder(spread(target), DraftModelDrafter(spread(draft, 3), num_draft_tokens=3), max_rows=2) as decoder:
        answers = {n: decoder.submit(there([n])["input_ids"], max_new_tokens=16, do_sample=False) for n in plain}
        for n, answer in answers.items():
            assert answer.result(60) == plain[n]
    assert decoder.stats.drafted_tokens > 0
