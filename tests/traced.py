"""`Traced` stands in for CUDA graphs on a CPU: a step's operations are traced once, with every value that the host gave
them, and played again. Whatever a step should have read from a static tensor, and did not, stays what it was. (On a GPU
it may be freed, too: `test_what_stays` looks for that.)"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from hf_specdec.target import captures


class Traced:
    """As `captures.CudaGraphs`."""

    recorded = played = 0

    def __init__(self, device: torch.device) -> None:
        """Nothing to prepare."""

    def __call__(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        type(self).recorded += 1
        step()  # as on a GPU: what is made once is there before the recording
        graph = make_fx(step)()
        result = graph()

        def replay() -> None:
            type(self).played += 1
            for before, now in zip(tree_leaves(result), tree_leaves(graph()), strict=True):
                if before is not None:  # a step may have an effect only
                    before.copy_(now)

        return replay, result


@contextmanager
def traced() -> Iterator[type[Traced]]:
    """Within the block what a GPU would record is traced."""
    Traced.recorded = Traced.played = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(captures.RECORDERS, "cpu", Traced)
        yield Traced
