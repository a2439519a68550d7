"""Calls that weigh drafts go by what was measured when a machine first met target and drafter: the same call drafts the
same, whatever the clock says meanwhile."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clocks
import models
import pytest
import torch
from captured_calls import DRAFTERS, decode
from eagle_heads import PAIRS
from huggingface_hub import constants
from toy_drafters import Toy

import hf_specdec
from hf_specdec.budget import Cost, Prices
from hf_specdec.generate import pricing
from hf_specdec.protocol import Draft

pytestmark = pytest.mark.measured


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(pricing, "_faults", lambda: 0)  # what the system gives a test says nothing
    return tmp_path / "hf_specdec" / "prices"


def new_process() -> None:
    """Nothing is known but what lies in files."""
    clocks.forget()
    assert not pricing._known


def what_was_done(model: Any, make: Callable[[], Any], lengths: list[int], **options: Any) -> list[Any]:
    """In a process of its own, of two calls with one drafter."""
    new_process()
    drafter, done = make(), []
    for seed in range(2):
        torch.manual_seed(seed)
        text, stats = decode(model, drafter, lengths, **options), drafter.last_stats
        done.append(
            [text.tolist(), sorted(stats.verify_widths.items()), stats.draft_calls, sorted(stats.sources.items())]
        )
    return done


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("draws", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", ["lookup", "suffix", "auto", "hybrid", "eagle"])
def test_a_call_does_not_depend_on_the_clock_that_runs_in_it(kind: str, lengths: list[int], draws: bool) -> None:
    model, draft = models.llama(), models.llama(seed=1)
    make = lambda: DRAFTERS[kind](draft)  # noqa: E731
    if kind == "eagle":
        model, one = PAIRS["EAGLE-3, SafeAILab"]()
        make = one.untaught
    with clocks.set_times():
        expected = what_was_done(model, make, lengths, do_sample=draws)
    for seed in range(2):
        with clocks.jumping(seed):
            assert what_was_done(model, make, lengths, do_sample=draws) == expected


def test_with_adapt_it_does() -> None:
    model, draft, done = models.llama(), models.llama(seed=1), []
    for seed in range(2):
        with clocks.jumping(seed):
            options = {"speculation": {"adapt": True}}
            done.append(what_was_done(model, lambda: DRAFTERS["hybrid"](draft), [9], **options))
    assert done[0] != done[1]
    with pytest.raises(hf_specdec.SpeculationError, match="adapt must be True or False, got 1"):
        decode(model, DRAFTERS["hybrid"](draft), [9], speculation={"adapt": 1})


def test_it_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft, measure, measured = models.llama(), models.llama(seed=1), pricing._measured, []

    def counted(*call: Any) -> Any:
        measured.append(call)
        return measure(*call)

    monkeypatch.setattr(pricing, "_measured", counted)
    for rows, count in (([9], 1), ([5], 1), ([9, 4], 2)):
        decode(model, DRAFTERS["auto"](draft), rows)
        assert len(measured) == count
    new_process()
    decode(models.llama(), DRAFTERS["auto"](draft), [9])  # another one of the same kind
    assert len(measured) == 2 and len(list(folder.iterdir())) == 2
    for spoilt in ("", "[]", json.dumps({"rows": 1}), "{"):
        for file in folder.iterdir():
            file.write_text(spoilt)
        new_process()
        before = len(measured)
        decode(model, DRAFTERS["auto"](draft), [9])
        assert len(measured) == before + 1
    decode(model.to(torch.float64), DRAFTERS["auto"](draft), [9])
    assert len(measured) == before + 2


def test_it_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = models.llama(), DRAFTERS["suffix"](None)
    settings = {"do_sample": True, "speculation": {"sampling": "coupled"}}
    torch.manual_seed(3)
    text = decode(model, drafter, [9], **settings)
    left = torch.rand(1)
    assert drafter.last_stats.emitted_tokens == 40
    read = len(drafter.store)
    new_process()
    monkeypatch.setattr(pricing, "hinders", lambda *_: True)
    drafter = DRAFTERS["suffix"](None)
    torch.manual_seed(3)
    assert torch.equal(decode(model, drafter, [9], **settings), text)
    assert torch.equal(torch.rand(1), left) and len(drafter.store) == read


def test_where_it_cannot_be_measured_or_kept_a_call_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = models.llama(), models.llama(seed=1)
    plain = decode(model, None, [9])
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    assert torch.equal(decode(model, DRAFTERS["hybrid"](draft), [9]), plain)
    new_process()

    def fails(*_: Any) -> None:
        raise ValueError("it wants a picture")

    monkeypatch.setattr(pricing, "_decode", fails)
    assert torch.equal(decode(model, DRAFTERS["hybrid"](draft), [9]), plain)


def test_forwards_that_are_given_their_memory_anew_price_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter, pages = models.llama(), DRAFTERS["hybrid"](models.llama(seed=1)), itertools.count(step=1 << 20)
    monkeypatch.setattr(pricing, "_faults", lambda: next(pages))
    assert torch.equal(decode(model, drafter, [9]), decode(model, None, [9]))
    assert list(pricing._known.values()) == [None] and not folder.exists()


def test_a_drafter_that_does_not_weigh_is_paused_where_it_loses() -> None:
    drafter = Toy(lambda _, sequences, room: Draft.from_trees([([1] * 8, list(range(-1, 7))) for _ in room]))
    with clocks.set_times():
        decode(models.llama(), drafter, [9], max_new_tokens=100)
    assert any("paused" in note for note in drafter.last_stats.notes)


def test_prices_survive_a_file() -> None:
    cost = Cost()
    for width, seconds in ((1, 1.0), (8, 1.5), (1, 1.0), (8, 1.5)):
        cost.observe_forward(2, width, seconds)
        cost.observe_between(width, 0.1)
    prices = Prices.of(2, cost, None, (1.0, 2.0))
    assert prices is not None and Prices.from_json(json.loads(json.dumps(prices.as_json()))) == prices
    assert prices.cost().round(2)(8) == pytest.approx(1.6)
