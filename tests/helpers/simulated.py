"""A GPU that is none. What the host asks of it is computed on the CPU, counted, and takes set times: nothing depends on
the machine.

Two clocks go on side by side. The host's moves by its own functions, by launches and by transfers; the device's by what
was launched. Where the host reads, it waits until the device has got there. The package's clock is the host's, and its
marks are the device's, as on a GPU. Recorded steps are traced ones: a replay is one launch.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from counting import Launches, Transfers
from traced import Traced
from transformers import PreTrainedModel

from hf_specdec import clock, transfer
from hf_specdec.clock import Moment
from hf_specdec.generate import pricing
from hf_specdec.target import recorded
from hf_specdec.tools.instruments.forwards import input_shape

MEASURED = {1: 7.18e-3, 2: 7.64e-3, 8: 7.97e-3, 16: 8.24e-3, 32: 8.75e-3, 64: 9.48e-3}
"""seconds of a recorded forward of a target of 8 B parameters on an H200, by its tokens"""
EAGER = 65.7e-3
"""seconds in which the host launches such a forward where it is not recorded, on the same machine"""
C = 0.08
"""time of a recorded forward of the draft model, in recorded steps of the target: measured there, too"""
LAUNCH = EAGER / (32 * 41)
"""seconds of the host per launch, with the Python around it: that forward has 32 layers of 41 kernels"""
KERNEL, TRANSFER, CALL = 2e-6, 10e-6, 1e-6
"""seconds, assumed: of the device per small kernel, of the host per transfer either way beside its wait, and per call
of one of the package's functions"""


def forward_seconds(width: int) -> float:
    """Of a recorded forward of the target over so many tokens, on the line between the nearest two that are known."""
    lines = list(pairwise(MEASURED.items()))
    (low, less), (high, more) = next((line for line in lines if width <= line[1][0]), lines[-1])
    return less + (more - less) * (width - low) / (high - low)


@dataclass
class Graph:
    """What a recorded step asks of the device."""

    seconds: Counter[str] = field(default_factory=Counter)
    """of `target`, of `draft`, and of `kernels` beside both"""
    slots: int = 0
    """tokens that the target is fed, padding included"""


@dataclass
class Event:
    """As of CUDA: when the device gets there."""

    at: float

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at - self.at)

    def wait(self, stream: Any) -> None:
        """There is one stream."""


class Device(Launches):
    """The device and its host; `with device.simulated():` a model decodes on it. `met` counts what the host did:
    `launches`, `graphs`, `writes`, `reads`, `calls`, and `slots` of the target's forwards."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.target = target
        self.host = self.busy = 0.0
        """seconds: the host's clock, and when the device will have done all that it was asked for"""
        self.seconds: Counter[str] = Counter()
        """of the device, as of a `Graph`; and for which the host `waited`"""
        self.operations: Counter[str] = Counter()
        """launched outside recorded steps"""
        self.functions: Counter[str] = Counter()
        """of the package, that the host called"""
        self.since = 0.0
        """the host's time from which on is counted"""
        self.prices: dict[str, Any] = {}
        """that it was found to have"""
        self._graph: Graph | None = None
        """that is being recorded"""

    def forget(self) -> None:
        """What was counted until now; the clocks go on."""
        self.since = self.host
        for counts in (self.met, self.seconds, self.operations, self.functions):
            counts.clear()

    # ------------------------------------------------------------------ what it takes

    def launch(self, seconds: dict[str, float]) -> None:
        """One launch, and what the device does then."""
        self.host += LAUNCH
        self.busy = max(self.busy, self.host) + sum(seconds.values())
        self.seconds.update(seconds)

    def launched(self, name: str) -> None:
        if self._graph is not None:
            self._graph.seconds["kernels"] += KERNEL
            return
        self.met["launches"] += 1
        self.operations[name] += 1
        self.launch({"kernels": KERNEL})

    def replayed(self, graph: Graph) -> None:
        self.met.update(graphs=1, slots=graph.slots)
        self.launch(graph.seconds)

    def wait(self, until: float) -> None:
        """Read what the device has got to by then."""
        self.met["reads"] += 1
        self.seconds["waited"] += max(0.0, until - self.host)
        self.host = max(self.host, until) + TRANSFER

    def wrote(self) -> None:
        self.met["writes"] += 1
        self.host += TRANSFER

    @property
    def there(self) -> float:
        """When it gets to what it is asked for now."""
        return max(self.host, self.busy)

    def forward(self, model: PreTrainedModel, tokens: int) -> None:
        """A model's forward over so many tokens, within a recorded step or not."""
        of_target = model is self.target
        seconds = {"target": forward_seconds(tokens)} if of_target else {"draft": C * forward_seconds(1)}
        if self._graph is not None:
            self._graph.seconds.update(seconds)
            self._graph.slots += tokens * of_target
            return
        self.met.update(eager=1, slots=tokens * of_target)
        self.host += EAGER * (1.0 if of_target else C)
        self.launch(seconds)

    # ------------------------------------------------------------------ where it stands in for a GPU

    @contextmanager
    def simulated(self) -> Iterator["Device"]:
        """Within the block, of this thread alone, what lies on the CPU lies on it."""
        run, nested = PreTrainedModel.__call__, False

        def call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            nonlocal nested
            if nested or self._apart:  # a model that is a part of one; a replay
                return run(model, *args, **kwargs)
            nested = True
            try:
                with self.apart():
                    output, (rows, width) = run(model, *args, **kwargs), input_shape(args, kwargs)
            finally:
                nested = False
            self.forward(model, rows * width)
            return output

        with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            patch.setattr(PreTrainedModel, "__call__", call, raising=False)
            patch.setitem(recorded.RECORDERS, "cpu", lambda device: Recorder(self))
            patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
            patch.setattr(pricing, "_known", self.prices)  # no real device goes by what this one takes
            patch.setattr(pricing, "write_whole", lambda *_: None)
            stack.enter_context(clock.use(lambda: self.host))
            for ours, instead in (
                (clock.mark, lambda device: Moment(self.host, Event(self.there))),
                (transfer.waits, lambda device: True),
                (transfer.to_host, self._to_host),
                (transfer.to_device, self._to_device),
                (transfer.fill, self._fill),
            ):
                stack.enter_context(everywhere(ours, instead))
            stack.enter_context(recorded.no_collector())  # what it collects may call something
            stack.enter_context(self)
            stack.enter_context(Reads(self))
            stack.enter_context(self._profiled())
            yield self

    def _to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        with torch._C.DisableTorchFunction():
            values = tensor.tolist()
        until = self.there
        if meanwhile is not None:
            meanwhile()
        self.wait(until)
        return values

    def _to_device(self, values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
        self.wrote()
        with torch._C.DisableTorchFunction(), self.apart():
            return torch.as_tensor(values, dtype=dtype)

    def _fill(self, there: torch.Tensor, values: Any) -> None:
        with self.apart():
            there.copy_(self._to_device(values, there.device))

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        def called(frame: FrameType, event: str, _: Any) -> None:
            name = frame.f_code.co_name
            if event != "call" or self._apart or self._graph is not None or name in ("<listcomp>", "<genexpr>"):
                return
            if (module := frame.f_globals.get("__name__", "")).startswith("hf_specdec"):
                self.met["calls"] += 1
                self.host += CALL
                self.functions[f"{module}.{frame.f_code.co_qualname}"] += 1

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)


class Recorder(Traced):
    """As `recorded.CudaGraphs`; it takes no time, as whoever compares has recorded before."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        device = self.device

        def again() -> Any:
            device._graph = Graph()  # a step is run more than once before it is recorded
            with device:  # modes are a thread's own, and steps are recorded on another one
                return step()

        try:
            replay, result = super().__call__(again)
            graph = device._graph
        finally:
            device._graph = None
        assert graph is not None

        def replayed() -> None:
            device.replayed(graph)
            with device.apart():
                replay()

        return replayed, result


class Reads(Transfers):
    """Transfers that go past `hf_specdec.transfer`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def _note(self, kind: str, caller: Any) -> None:
        if self.device._apart or self.device._graph is not None:
            return
        super()._note(kind, caller)
        self.device.wait(self.device.there)


@contextmanager
def everywhere(function: Callable[..., Any], instead: Callable[..., Any]) -> Iterator[None]:
    """Within the block the modules of the package that have a function by its name have another one."""

    def swap(old: Callable[..., Any], new: Callable[..., Any]) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("hf_specdec") and vars(module).get(function.__name__) is old:
                setattr(module, function.__name__, new)

    swap(function, instead)
    try:
        yield
    finally:
        swap(instead, function)  # also where a module was first imported meanwhile
