"""`Traced` stands in for CUDA graphs on a CPU: a step's operations are noted once, with every value that the host gave
them, and played again. Whatever a step should have read from a static tensor, and did not, stays what it was. (On a GPU
it may be freed, too: `test_what_stays` looks for that.)"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hf_specdec.target import recorded
from hf_specdec.target.lasting import on_lasting_thread


class Number(int):
    """of a tensor among all that were made"""


class Noted(TorchDispatchMode):
    """Within it operations run and are noted, and `play` runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, list[Any], Any]] = []
        """with what they were given, a `Number` for what an earlier one had made, and the form of that"""
        self.made: list[Tensor] = []
        self.numbers: dict[int, Number] = {}
        """by `id`"""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in operation.tags:
            raise RuntimeError(f"{operation} asks the device for a value")
        given, form = tree_flatten((args, kwargs or {}))
        self.operations.append((operation, [self.numbers.get(id(one), one) for one in given], form))
        result = operation(*args, **kwargs or {})
        for tensor in tensors_of(result):
            self.numbers[id(tensor)] = Number(len(self.made))
            self.made.append(tensor)
        return result

    def play(self) -> list[Tensor]:
        """What was made this time."""
        made: list[Tensor] = []
        for operation, given, form in self.operations:
            args, kwargs = tree_unflatten([made[one] if type(one) is Number else one for one in given], form)
            made += tensors_of(operation(*args, **kwargs))
        return made


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class Traced:
    """As `recorded.CudaGraphs`."""

    recorded = played = 0

    def __init__(self, device: torch.device) -> None:
        """Nothing to prepare."""

    def __call__(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        return on_lasting_thread(lambda: self._recorded(step))

    def _recorded(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        type(self).recorded += 1
        step()  # as on a GPU: what is made once is there before the recording
        with Noted() as noted:
            result = step()
        # A step may have an effect only, or give a static tensor.
        static = [(one, noted.numbers[id(one)]) for one in tensors_of(result) if id(one) in noted.numbers]

        def replay() -> None:
            type(self).played += 1
            made = noted.play()
            for tensor, number in static:
                tensor.copy_(made[number])

        return replay, result


@contextmanager
def traced() -> Iterator[type[Traced]]:
    """Within the block what a GPU would record is traced."""
    Traced.recorded = Traced.played = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recorded.RECORDERS, "cpu", Traced)
        yield Traced
