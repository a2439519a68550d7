"""`Captures`: steps over tensors that stay where they are. A GPU records a step's launches once and replays them; the
host then launches one graph in place of hundreds of kernels.

A step reads and writes static tensors only, and asks the device nothing. Where nothing can be recorded it simply runs.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..clock import now

T = TypeVar("T")

MET = 2
"""times that a step is met before it is recorded: many shapes come once"""


@dataclass
class Spent:
    """What recording has taken."""

    graphs: int = 0
    seconds: float = 0.0


class Captures:
    """The steps over one set of static tensors, which never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.spent = Spent()
        self.at_once = False
        """whether a step is recorded when it is first met"""
        recorder = RECORDERS.get(device.type)
        self._record = None if recorder is None else recorder(device)
        self._met: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, tuple[Callable[[], object], Any]] = {}

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        """The step's result. It may be static, too: the next run of any step may overwrite it.

        Args:
            key: equal for steps that do the same with the same static tensors.
        """
        if self._record is None:
            return step()
        if key not in self._recorded:
            self._met[key] += 1
            if self._met[key] < MET and not self.at_once:
                return step()
            began = now()
            self._recorded[key] = self._record(step)
            self.spent.graphs += 1
            self.spent.seconds += now() - began
        replay, result = self._recorded[key]
        replay()
        return result


class CudaGraphs:
    """Records steps as CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """What replays the step, and the tensors that hold its result then."""
        here, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            step()  # kernels are chosen and workspaces made in a first run, which cannot be recorded
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a PEARL worker) may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = step()
        return graph.replay, result


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraphs}
"""by kind of device"""
