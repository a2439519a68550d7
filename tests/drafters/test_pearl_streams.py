"""On one card: the draft model computes on a stream of its own, behind what it has to wait for. CUDA is pretended."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import llama, prompts, spy

from hf_specdec import PearlDrafter
from hf_specdec.drafters.pearl.worker import serving
from hf_specdec.drafters.pearl.worker.wire import Link

TARGETS = "the target's stream"


class Stream:
    """A CUDA stream, without a card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class Cuda:
    """What CUDA has of streams: each thread's own, which is the target's where nothing else was asked for."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.made: list[Stream] = []

    def make(self, device: torch.device) -> Stream:
        self.made.append(Stream(device))
        return self.made[-1]

    def current(self, device: Any = None) -> Any:
        return getattr(self.here, "stream", TARGETS)

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.here.stream = self.current(), stream
        try:
            yield
        finally:
            self.here.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    for name, function in (("Stream", found.make), ("current_stream", found.current), ("stream", found.entered)):
        monkeypatch.setattr(torch.cuda, name, function)
    return found


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the draft model were on one."""
    monkeypatch.setattr("hf_specdec.drafters.pearl.worker.serving.input_device", lambda model: torch.device("cuda:0"))


def watched(cuda: Cuda, model: Any) -> list[Any]:
    """The streams of a model's forwards."""
    seen: list[Any] = []
    model.register_forward_pre_hook(spy(lambda *_: seen.append(cuda.current())))
    return seen


def play(target: Any, drafter: PearlDrafter, **options: Any) -> None:
    settings = {"max_new_tokens": 24, "pad_token_id": 0, "top_k": 0} | options
    plain = target.generate(**prompts([7, 4]), **settings) if not options.get("do_sample") else None
    text = target.generate(**prompts([7, 4]), **settings, assistant_model=drafter)
    assert plain is None or torch.equal(text, plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_draft_computes_beside_the_target(cuda: Cuda, on_a_card: None, do_sample: bool) -> None:
    """Its forwards on one stream for all calls; the target's on the caller's."""
    target, draft = llama(), llama(seed=3)
    drafter = PearlDrafter(draft, window=3, worker="thread")
    theirs, ours = watched(cuda, target), watched(cuda, draft)
    play(target, drafter, do_sample=do_sample)  # the probes, and a first call
    theirs.clear(), ours.clear()
    cuda.here.stream = mine = Stream(torch.device("cuda:0"))  # the caller's own
    play(target, drafter, do_sample=do_sample)
    (stream,) = cuda.made
    assert ours and set(ours) == {stream} and set(theirs) == {mine}
    assert stream.waited_for == [TARGETS, mine]  # the weights may be on the way, in each call's stream


def test_a_process_has_one_too(cuda: Cuda, on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda link, model, stream: served.append(stream))
    monkeypatch.setattr(serving.os, "_exit", lambda code: served.append(code))
    monkeypatch.setattr(serving.gc, "freeze", lambda: None)
    monkeypatch.setattr(serving, "end_with_owner", lambda: None)
    mine, theirs = socket.socketpair()
    link = Link(mine)
    link.send("model", llama(), torch.get_num_threads())
    serving.main(theirs.detach())
    assert link.receive() == ("ready",)
    assert cuda.made == served[:1] and served[0].waited_for == [TARGETS]
    link.close()


def test_on_the_host_there_is_none(cuda: Cuda) -> None:
    target, draft = llama(), llama(seed=3)
    seen = watched(cuda, draft)
    play(target, PearlDrafter(draft, window=3, worker="thread"))
    assert not cuda.made and set(seen) == {TARGETS}
