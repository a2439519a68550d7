"""Drafters that flags ask for: made once per target and options, few are kept, and nobody waits for another's."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hub_tools import tiny_model
from transformers import PreTrainedModel

from hf_specdec import SpeculationError
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import drafter_from_flag, flag

SECONDS = 10
"""after which a thread that should not wait is taken to wait"""


class SlowLoad:
    """In place of `load_drafter`: a load of the repo "slow" ends when `go` is set, and fails if `error` is."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.loads: list[str] = []
        self.error: Exception | None = None

    def __call__(self, cls: Any, name: str, **options: Any) -> PromptLookupDrafter:
        self.loads.append(name)
        if name == "slow":
            self.began.set()
            assert self.go.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return PromptLookupDrafter(**options)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SlowLoad:
    slow = SlowLoad()
    monkeypatch.setattr(flag, "load_drafter", slow)
    return slow


@pytest.fixture
def threads(load: SlowLoad) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool
        load.go.set()


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


def ask(target: PreTrainedModel, name: str = "slow", **options: Any) -> Any:
    return drafter_from_flag(target, "prompt_lookup", {"drafter": name, **options})


def test_two_at_once_load_once(target: PreTrainedModel, load: SlowLoad, threads: ThreadPoolExecutor) -> None:
    asked = [threads.submit(ask, target) for _ in range(3)]
    assert load.began.wait(SECONDS)
    assert not any(one.done() for one in asked)
    load.go.set()
    assert len({id(one.result(SECONDS)) for one in asked}) == 1
    assert ask(target) is asked[0].result()
    assert load.loads == ["slow"]


def test_a_slow_load_blocks_no_other(target: PreTrainedModel, load: SlowLoad, threads: ThreadPoolExecutor) -> None:
    slow = threads.submit(ask, target)
    assert load.began.wait(SECONDS)
    others = [
        threads.submit(ask, target, "quick"),
        threads.submit(ask, tiny_model(), "quick"),
        threads.submit(drafter_from_flag, target, "prompt_lookup", {"max_match": 4}),
    ]
    for other in others:
        other.result(SECONDS / 2)
    assert not slow.done()
    load.go.set()
    slow.result(SECONDS)


def test_a_failed_load_is_told_to_all_and_not_kept(
    target: PreTrainedModel, load: SlowLoad, threads: ThreadPoolExecutor
) -> None:
    kept = ask(target, "good")
    load.error = SpeculationError("no connection")
    asked = [threads.submit(ask, target) for _ in range(2)]
    assert load.began.wait(SECONDS)
    load.go.set()
    for one in asked:
        with pytest.raises(SpeculationError, match="no connection"):
            one.result(SECONDS)
    for number in range(flag.MOST_DRAFTERS):
        with pytest.raises(SpeculationError):
            ask(target, f"bad{number}")
    assert ask(target, "good") is kept  # failures push nothing out
    load.error = None
    assert ask(target) is ask(target)


def test_the_least_recently_used_goes(target: PreTrainedModel, load: SlowLoad) -> None:
    first, second = ask(target, "first"), weakref.ref(ask(target, "second"))
    for number in range(flag.MOST_DRAFTERS - 2):
        ask(target, str(number))
    assert ask(target, "first") is first
    ask(target, "one more")
    gc.collect()
    assert second() is None
    assert ask(target, "first") is first
    ask(target, "second")
    assert load.loads.count("second") == 2
    assert load.loads.count("first") == 1


def test_drafters_end_with_their_target(load: SlowLoad) -> None:
    target = tiny_model()
    drafter = weakref.ref(ask(target, "quick"))
    del target
    gc.collect()
    assert drafter() is None
