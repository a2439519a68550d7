"""What a GPU would feel, counted on the CPU: every place where the host would wait for the device, and every launch."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.transfer import on_host, to_device, values_on_host

OLD_MASKS = Version(transformers.__version__) < Version("5.23")
"""whether transformers itself reads its 2-D mask in every forward, in plain decoding, too"""
READS = {
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "numpy",
    "nonzero",
    "unique",
    "equal",
}
"""functions that give the host a value of the device, or a shape that depends on one"""
MAKES = {"tensor", "as_tensor", "new_tensor", "from_numpy", "asarray", "scalar_tensor"}
"""functions that put host values on a device, from memory that the copy waits for"""
ON_HOST = on_host.__code__, values_on_host.__code__
"""what makes and reads tensors that stay there"""
VIEWS = {
    "alias", "as_strided", "detach", "empty", "expand", "lift_fresh", "permute", "select", "slice", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_local_scalar_dense",
}  # fmt: skip
"""operations that launch nothing; the last one reads"""


class Transfers(TorchFunctionMode):
    """Counts both directions while it is active, on this thread: `to_host`, `to_device` and `waiting` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.where: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        caller = sys._getframe(1)
        if caller.f_code in ON_HOST:
            return func(*args, **(kwargs or {}))
        if name in READS or func is torch.equal:
            self._note("to_host", caller)
        elif name in MAKES:
            self._note("to_device" if caller.f_code is to_device.__code__ else "waiting", caller)
        elif name in ("__getitem__", "__setitem__") and _by_host_values(args[1]):
            self._note("waiting", caller)
        elif name in ("__getitem__", "__setitem__", "masked_select") and _by_mask(args[1]):
            self._note("to_host", caller)  # its result has as many elements as the mask says
        elif name == "to" and len(args) > 1 and args[1] == "cpu":
            self._note("to_host", caller)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, caller: Any) -> None:
        if caller.f_code.co_filename.endswith("masking_utils.py") and OLD_MASKS:
            return
        self.counts[kind] += 1
        self.where[f"{kind} {caller.f_code.co_filename.rsplit('/', 1)[-1]}:{caller.f_lineno}"] += 1


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _by_host_values(index: Any) -> bool:
    return any(isinstance(part, (list, range)) for part in _parts(index))


def _by_mask(index: Any) -> bool:
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in _parts(index))


class Launches(TorchDispatchMode):
    """Counts operations while it is active, but for those of a replay, which is one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self._apart = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the block nothing is counted."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def launched(self, name: str) -> None:
        self.met[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if not self._apart and name not in VIEWS:
            self.launched(name)
        return func(*args, **(kwargs or {}))
