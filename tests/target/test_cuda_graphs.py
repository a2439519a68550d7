"""How steps become CUDA graphs, with `torch.cuda` pretended: in which order, on which thread, in whose modes."""

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_specdec import errors
from hf_specdec.target.lasting import on_lasting_thread
from hf_specdec.target.recorded import RECORDERS, CudaGraphs, RecordedSteps

IN_ORDER = ["run", "clear", "begin", "run", "end", "clear"]


class Stream:
    def __init__(self, device: Any = None) -> None:
        """On no device."""

    def wait_stream(self, other: "Stream") -> None:
        """Nothing is asynchronous here."""


class Graph:
    def replay(self) -> None:
        """Results are there."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with the device. cuBLAS's workspaces are cleared between the first run and the recording, and behind
    it."""
    events: list[str] = []

    @contextmanager
    def recording(graph: Graph, **_: Any) -> Any:
        events.append("begin")
        try:
            yield
        finally:
            events.append("end")

    @contextmanager
    def entered(stream: Stream) -> Any:
        yield

    for name, stand_in in {
        "graph_pool_handle": tuple, "Stream": Stream, "CUDAGraph": Graph, "graph": recording, "stream": entered,
        "current_stream": Stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)
    monkeypatch.setitem(RECORDERS, "cpu", CudaGraphs)
    return events


def met_twice(step: Callable[[], Any]) -> Any:
    steps = RecordedSteps(torch.device("cpu"))
    return [steps.run("a step", step) for _ in range(2)][-1]


def test_workspaces_are_those_of_the_recording_alone(events: list[str]) -> None:
    met_twice(lambda: events.append("run"))
    assert events == ["run", *IN_ORDER]  # the first time it is only met


def test_they_are_cleared_behind_a_recording_that_fails(events: list[str]) -> None:
    def step() -> None:
        events.append("run")
        if events[-2:-1] == ["begin"]:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.warns(errors.SpeculationWarning, match="a forward is not recorded"):
        met_twice(step)
    assert events == ["run", *IN_ORDER, "run"]


def test_all_are_made_on_one_thread(events: list[str]) -> None:
    """Whoever asks: a thread that ends takes what it was given with it."""
    met: list[threading.Thread] = []
    for _ in range(3):
        asks = threading.Thread(target=met_twice, args=(lambda: met.append(threading.current_thread()),))
        asks.start()
        asks.join()
    recorders = {thread for thread in met if met.count(thread) > 1}
    assert len(met) == 9 and len(recorders) == 1 and recorders.pop().is_alive()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_a_step_is_recorded_in_the_modes_of_its_caller(mode: Callable[[], Any], events: list[str]) -> None:
    def modes() -> list[Any]:
        return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(0).device]

    with mode():
        assert met_twice(modes) == modes()


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    assert on_lasting_thread(os.getpid) == os.getpid()
    if not (child := os.fork()):
        os._exit(on_lasting_thread(os.getpid) != os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
