"""Devices that are none: tensors that say where they lie, and refuse to meet one that lies elsewhere.

They are named `cpu:1`, `cpu:2` and so on, and everything is computed on the CPU. Within `pretended_devices()` a tensor
that is made on one of them, or moved there, says that it lies there; an operation over tensors of different devices
raises, as it does on real ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HOST = torch.device("cpu")
MOVES = ("_to_copy", "copy_")
INDEXED = ("index", "index_put_", "_unsafe_index")
"""operations that take indices from the host, too"""


def is_pretended(device: torch.device) -> bool:
    return device.type == "cpu" and bool(device.index)


class Placed(Tensor):
    """A tensor on a pretended device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> "Placed":
        if isinstance(held, Placed):  # accelerate makes a parameter anew by its class
            return held
        kept = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device
        )
        kept.held = held
        return kept

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.held!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    """What is made on a pretended device lies there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What torch makes of Python's numbers without asking its operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def pretended_devices() -> Iterator[None]:
    """Within the block, of this thread alone, there are such devices."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # by new ones: a tensor stays where it lies
    try:
        with Functions(), Operations():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives: computed on the CPU, and said to lie where it would."""
    met: list[Tensor] = []
    held = each(lambda tensor: met.append(tensor) or getattr(tensor, "held", tensor), (args, kwargs))
    name, first = func.overloadpacket.__name__, args[0].device if args and isinstance(args[0], Tensor) else HOST
    lies = first if name in MOVES else together(func, met, {first, HOST} if name in INDEXED else set())
    if (asked := kwargs.get("device")) is not None:
        lies = asked if is_pretended(asked) else HOST
        held[1]["device"] = HOST
    result = func(*held[0], **held[1])
    if func._schema.is_mutable:
        return args[0]
    return each(lambda tensor: Placed(tensor, lies), result) if is_pretended(lies) else result


def together(func: Any, tensors: list[Tensor], allowed: set[torch.device]) -> torch.device:
    """The one device on which they lie. Numbers of the host may meet any.

    Args:
        allowed: where they may lie all the same.
    """
    where = {tensor.device for tensor in tensors if isinstance(tensor, Placed) or tensor.ndim}
    if len(where) > 1 and not where <= allowed:
        raise RuntimeError(f"{func} wants tensors of one device, and these lie on {', '.join(sorted(map(str, where)))}")
    return next(iter(where - {HOST}), HOST)


def each(action: Callable[[Tensor], Any], values: Any) -> Any:
    """The same nest of values, with what an action makes of its tensors."""
    if isinstance(values, Tensor):
        return action(values)
    if isinstance(values, dict):
        return {name: each(action, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)([each(action, value) for value in values])
    return values
