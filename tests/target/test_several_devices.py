"""A target over two devices, as `device_map` spreads it: nothing meets what lies elsewhere, and the text is plain's."""

import threading
from collections.abc import Iterator
from typing import Any

import models
import pytest
import stream_models
import test_heads
import torch
from accelerate import dispatch_model
from pretended_devices import Placed, pretended_devices

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
)


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
    """The lower layers on one device, the upper ones and the head on another."""
    layers, upper = len(model.model.layers), first + 1
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": upper, "lm_head": upper}
    places |= {f"model.layers.{i}": upper if i >= layers // 2 else first for i in range(layers)}
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


MAKES: dict[str, Any] = {
    "lookup": lambda target, draft: PromptLookupDrafter(),
    "lookup, branches": lambda target, draft: PromptLookupDrafter(num_branches=3),
    "suffix": lambda target, draft: SuffixDrafter(),
    "draft": lambda target, draft: DraftModelDrafter(draft, num_draft_tokens=3),
    "tree": lambda target, draft: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=2),
    "hybrid": lambda target, draft: HybridDrafter(draft, num_draft_tokens=3),
    "pearl": lambda target, draft: PearlDrafter(draft, window=3, worker="thread"),
}


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
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_streams_in_such_a_target(name: str, lengths: list[int]) -> None:
    target = stream_models.target_of(name, layers=4)
    plain = target.generate(**models.prompts(lengths), **OPTIONS)
    for way in ({}, {"prune_below": 0.02}, {"known_tokens": 40}):
        drafter = stream_models.streams_of(target, layers=3, **way)
        drafter.streams.known.copy_(torch.arange(len(drafter.streams.known)))
        agree(spread(target), drafter, lengths, plain)


@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize("pair", ["DFlash, mixed", "GLM-4-MoE, 3"])
def test_heads_beside_such_a_target(pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for session in (test_heads.DFlashSession, test_heads.MtpSession):
        monkeypatch.setattr(session, "weighs", True)
    test_heads.mtp.cache_clear(), test_heads.dflash.cache_clear()
    try:
        target, drafter = test_heads.PAIRS[pair]()
        plain = target.generate(**models.prompts(lengths), **OPTIONS)
        spread(target)
        if pair.startswith("DFlash"):
            on(drafter.draft_model, 2)
        else:
            on(drafter.model.layers, 2)
        agree(target, drafter, lengths, plain)
    finally:
        test_heads.mtp.cache_clear(), test_heads.dflash.cache_clear()


@pytest.mark.set_times
def test_requests_that_come_and_go() -> None:
    target, draft = models.llama(), models.llama(seed=3)
    plain = {n: target.generate(**models.prompts([n]), **OPTIONS)[0, n:].tolist() for n in (7, 4)}
    with BatchDecoder(spread(target), DraftModelDrafter(spread(draft, 3), num_draft_tokens=3), max_rows=2) as decoder:
        answers = {n: decoder.submit(there([n])["input_ids"], max_new_tokens=16, do_sample=False) for n in plain}
        for n, answer in answers.items():
            assert answer.result(60) == plain[n]
    assert decoder.stats.drafted_tokens > 0


def test_beams() -> None:
    target, draft = models.llama(), models.llama(seed=3)
    plain = target.generate(**models.prompts([7, 4]), **OPTIONS, num_beams=2)
    drafter = DraftModelDrafter(spread(draft, 3), num_draft_tokens=3)
    agree(spread(target), drafter, [7, 4], plain, num_beams=2)
