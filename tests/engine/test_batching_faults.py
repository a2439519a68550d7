"""What fails in a batch that rows join, fails for those whom it concerns, and nobody waits in vain."""

import functools
import threading
import time
from typing import Any

import models
import pytest
import torch
from batch_requests import DRAFT, TARGET, plain, texts
from processes import until
from toy_drafters import Toy

from hf_specdec import BatchDecoder, PearlDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.protocol import Draft
from hf_specdec.target.joining import JoiningRunner

pytestmark = pytest.mark.usefixtures("no_decoder_is_left")


def test_a_join_that_fails_fails_its_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    join = JoiningRunner.join

    def failing(self: Any, *args: Any) -> None:
        raise RuntimeError("out of memory")

    with BatchDecoder(model, max_rows=2) as decoder:
        monkeypatch.setattr(JoiningRunner, "join", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(30)
        monkeypatch.setattr(JoiningRunner, "join", join)
        assert decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(30) == plain(model, texts()[0], 4)


@pytest.mark.filterwarnings("ignore")
def test_nobody_waits_for_a_thread_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = BatchDecoder(models.llama(), max_rows=1)

    def breaking(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(decoder._engine, "turn", breaking)
    monkeypatch.setattr(decoder._engine, "fail", breaking)
    answers = [decoder.submit(ids, max_new_tokens=4) for ids in texts()[:1]]
    for answer in answers:
        with pytest.raises(MemoryError):
            answer.result(30)
    until(lambda: not decoder.alive)
    with pytest.raises(SpeculationError, match="closed"):
        decoder.submit(texts()[0], max_new_tokens=4)
    decoder.close()


def test_a_model_that_fails_fails_those_who_are_there_and_nobody_after_them() -> None:
    model = models.llama()
    forward, broken = model.forward, threading.Event()

    @functools.wraps(forward)
    def failing(*args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    model.forward = failing
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=3) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=300, do_sample=False) for ids in texts()[:3]]
        for answer in answers:
            next(iter(answer))
        broken.set()
        for answer in answers:
            with pytest.raises(RuntimeError, match="out of memory"):
                answer.result(60)
            with pytest.raises(RuntimeError, match="out of memory"):
                list(answer)
        broken.clear()
        assert decoder.submit(texts()[0], max_new_tokens=9, do_sample=False).result(60) == plain(model, texts()[0], 9)


@pytest.mark.eager
def test_what_is_wrong_with_one_request_ends_that_one_alone() -> None:
    model = models.llama()
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=4) as decoder, models.slow(model, 0.002):
        beside = [decoder.submit(ids, max_new_tokens=40, do_sample=False) for ids in texts()[:3]]
        bad = decoder.submit(texts()[3], max_new_tokens=4, do_sample=False, sequence_bias={(5000,): 1.0})
        later = decoder.submit(texts()[4], max_new_tokens=4, do_sample=False, forced_eos_token_id=10**6)
        with pytest.raises((ValueError, IndexError)):
            bad.result(60)
        with pytest.raises(IndexError):  # raised when it is about to end, in a round of all
            later.result(60)
        assert [answer.result(60) for answer in beside] == [plain(model, ids, 40) for ids in texts()[:3]]


@pytest.mark.filterwarnings("ignore::hf_specdec.SpeculationWarning")
@pytest.mark.parametrize("fault", ["raises", "nonsense", "late", "too much"])
def test_a_drafter_can_only_cost_time(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        nonlocal calls
        calls += 1
        if calls < 4:
            return Draft.from_lists([[5][:most] for most in room])
        if fault == "raises":
            raise RuntimeError("no")
        if fault == "nonsense":
            return Draft.from_lists([[10**6][:most] for most in room])
        if fault == "late":
            time.sleep(0.3)
        return Draft.from_lists([[5] * (300 if fault == "too much" else 1) for _ in room])

    drafter = Toy(propose)
    monkeypatch.setattr(drafter.session_class, "patience", 0.1)
    with BatchDecoder(TARGET, drafter, max_rows=4) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=24, do_sample=False) for ids in texts()]
        assert [answer.result(60) for answer in answers] == [plain(TARGET, ids, 24) for ids in texts()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"logits_processor": [lambda ids, scores: scores]}, "model.generate"),
        ({"assistant_model": PromptLookupDrafter()}, "assistant_model"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"cache_implementation": "static"}, "dynamic cache"),
        ({"use_cache": False}, "dynamic cache"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "attention_mask"),
        ({"position_ids": torch.arange(5)[None] + 3}, "position_ids"),
        ({"output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.eager
def test_what_a_row_cannot_have(options: dict[str, Any], message: str) -> None:
    with BatchDecoder(TARGET) as decoder:
        with pytest.raises(ValueError, match=message):
            decoder.submit(texts()[0], **{"max_new_tokens": 4} | options)
        for bad in ([], [[1, 2], [3, 4]], torch.zeros(1, 1, 1, dtype=torch.long), "a text", [10**6], [-1], [0.5]):
            with pytest.raises(SpeculationError, match="input_ids"):
                decoder.submit(bad, max_new_tokens=4)  # type: ignore[arg-type]
        with pytest.raises(SpeculationError, match="shorten the prompt"):
            decoder.submit([5] * 600, max_new_tokens=4)
        assert decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(60) == plain(TARGET, texts()[0], 4)
    with pytest.raises(SpeculationError, match="closed"):
        decoder.submit(texts()[0], max_new_tokens=4)


@pytest.mark.eager
def test_a_criterion_that_raises_ends_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    with BatchDecoder(model, max_rows=4) as decoder, models.slow(model, 0.002):
        beside = decoder.submit(texts()[0], max_new_tokens=40, do_sample=False)
        bad = decoder._request(texts()[1], None, {"max_new_tokens": 9, "do_sample": False})

        def raising(_ids: Any, _b: int, length: int, _token: int) -> bool:
            if length > len(texts()[1]) + 2:
                raise RuntimeError("no such string")
            return False

        monkeypatch.setattr(bad.call.stopping, "row", raising)
        with decoder._news:
            decoder._waiting.append(bad)
            decoder._news.notify_all()
        with pytest.raises(RuntimeError, match="no such string"):
            bad.answer.result(60)
        assert beside.result(60) == plain(model, texts()[0], 40)


def test_what_no_batch_is_made_of() -> None:
    with pytest.raises(SpeculationError, match="from_pretrained"):
        BatchDecoder(TARGET, "no_such_type")  # type: ignore[arg-type]
    with pytest.raises(SpeculationError, match="drafts while the target verifies"):
        BatchDecoder(TARGET, PearlDrafter(DRAFT))
    with pytest.raises(SpeculationError, match=r"model\.generate"):
        BatchDecoder(models.build("Bloom", "eager"))
    for name in ("max_rows", "max_tokens", "max_waiting"):
        for bad in (0, -1, 1.5, "8"):
            with pytest.raises(SpeculationError, match=name):
                BatchDecoder(TARGET, **{name: bad})
