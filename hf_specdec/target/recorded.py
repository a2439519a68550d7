"""`RecordedSteps`: steps over tensors that stay where they are. A GPU records a step's launches once and replays them;
the host then launches one graph in place of hundreds of kernels.

A step reads and writes static tensors only, and asks the device nothing. Where nothing can be recorded it simply runs.
"""

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from ..clock import now
from ..errors import shown, warn
from .lasting import on_lasting_thread

T = TypeVar("T")

MET = 2
"""times that a step is met before it is recorded: many shapes come once"""

MOST_RECORDED = 256
"""steps of one set of tensors: each setting of sampling, and each length that texts have doubled to, has its own"""

MOST_MET = 1024
"""steps that are counted; then counting begins anew"""

recordings: list[float] = []
"""seconds that each one of this process took"""

_first_runs = 0
_told: Callable[[], object] | None = None
"""called after each recording while steps are recorded when they are first met"""


def recorded_since(count: int) -> str:
    """What was recorded since there were so many `recordings`; empty if nothing."""
    took = recordings[count:]
    return f"recorded {len(took)} forwards in {sum(took):.1f} s, for this call and later ones" if took else ""


def first_runs() -> int:
    """Runs in this process of steps that later ones will replay: what they took says nothing of those."""
    return _first_runs


@contextmanager
def at_once(told: Callable[[], object]) -> Iterator[None]:
    """Within the block steps are recorded when they are first met.

    Args:
        told: called after each.
    """
    global _told
    _told = told
    try:
        yield
    finally:
        _told = None


def is_at_once() -> bool:
    return _told is not None


class RecordedSteps:
    """The steps over one set of static tensors, which never run side by side."""

    def __init__(self, device: torch.device) -> None:
        recorder = RECORDERS.get(device.type)
        self._record = None if recorder is None else recorder(device)
        self._met: Counter[Hashable] = Counter()
        self._recorded: OrderedDict[Hashable, tuple[Callable[[], object], Any]] = OrderedDict()
        """the last ones used last"""
        self._failed: set[Hashable] = set()

    @property
    def records(self) -> bool:
        """Whether the device can."""
        return self._record is not None

    @property
    def num_bytes(self) -> int:
        """That recordings take of the device's memory."""
        return getattr(self._record, "num_bytes", 0)

    def will_record(self, key: Hashable) -> bool:
        """Whether the next run records this step. Then the step is run more than once."""
        if self._record is None or key in self._recorded or key in self._failed:
            return False
        return is_at_once() or self._met[key] + 1 >= MET

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        """The step's result. It may be static, too: the next run of any step may overwrite it.

        Args:
            key: equal for steps that do the same with the same static tensors.
        """
        global _first_runs
        if self._record is None or key in self._failed:
            return step()
        if key not in self._recorded:
            _first_runs += 1
            record = self.will_record(key)
            if len(self._met) > MOST_MET:
                self._met.clear()
            self._met[key] += 1
            if not record or not self._add(key, step, self._record):
                return step()
        self._recorded.move_to_end(key)
        replay, result = self._recorded[key]
        replay()
        return result

    def _add(self, key: Hashable, step: Callable[[], object], record: Callable[..., Any]) -> bool:
        """Record a step; whether that could be done."""
        began = now()
        try:
            self._recorded[key] = record(step)
        except Exception as error:  # of a kernel that cannot be recorded, or for want of memory
            self._failed.add(key)
            warn(f"a forward is not recorded: it raised {shown(error)}. The text is not affected")
            return False
        recordings.append(now() - began)
        if (told := _told) is not None:
            told()
        while len(self._recorded) > MOST_RECORDED:
            self._recorded.popitem(last=False)
        return True


class Replayed(Protocol):
    """Of a stand-in for a model's `forward` that looks on: it may have an attribute `replayed`, which is called around
    whatever is replayed."""

    def __call__(self, run: Callable[[], T], rows: int, width: int, held: int, times: int) -> T:
        """
        Args:
            run: gives what is to be returned.
            rows: of a forward, with `width` tokens each behind `held` others.
            times: forwards, one after the other.
        """


@contextmanager
def no_collector() -> Iterator[None]:
    """Within the block no garbage is collected: what is done for others then would be recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Within the block cuBLAS makes workspaces anew, in the pool of what is recorded, and nobody has them afterwards.
    Those of before are others' to free, and a recording would go on using them."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraphs:
    """Records steps as CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.aside = torch.cuda.Stream(device)
        """one for all: what one recording has freed the next one may use on the same stream only"""
        self.num_bytes = 0
        """that the pool has taken"""

    def __call__(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """What replays the step, and the tensors that hold its result then."""
        here = torch.cuda.current_stream(self.device)
        return on_lasting_thread(lambda: self._recorded(step, here))

    def _recorded(self, step: Callable[[], T], here: torch.cuda.Stream) -> tuple[Callable[[], object], T]:
        """
        Args:
            here: the stream whose work the step goes on from.
        """
        with torch.cuda.stream(here):  # and its device; afterwards, even where a recording fails, those of before
            graph = torch.cuda.CUDAGraph()
            self.aside.wait_stream(here)
            try:
                with torch.cuda.stream(self.aside):
                    step()  # kernels are chosen in a first run, which cannot be recorded
                # Other threads (a PEARL worker) may go on using the device meanwhile.
                capturing = torch.cuda.graph(
                    graph, pool=self.pool, stream=self.aside, capture_error_mode="thread_local"
                )
                with no_collector(), own_workspaces(), capturing:
                    before = torch.cuda.memory_reserved(self.device)
                    result = step()
                    self.num_bytes += torch.cuda.memory_reserved(self.device) - before
            finally:
                here.wait_stream(self.aside)
        return graph.replay, result


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraphs}
"""by kind of device"""
