"""The ways between host and device. Reading waits for everything that the device has been asked for; writing must not.

A round reads once (`to_host`). What the host makes goes the other way without waiting (`to_device`). Nothing else in
the package moves values between the two, so that what a GPU would feel can be counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether reading from this device means to wait for it."""
    return device.type != "cpu"


def to_host(tensor: Tensor, meanwhile: Callable[[], object] | None = None) -> list[Any]:
    """The values of a tensor, in nested lists: the one transfer of a round.

    Args:
        meanwhile: asks the device for more once the values are on their way; nobody waits for that.
    """
    if meanwhile is None or tensor.device.type != "cuda":
        values = tensor.tolist()
        if meanwhile is not None:
            meanwhile()
        return values
    copy, arrived = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    meanwhile()
    arrived.synchronize()
    return copy.tolist()


def on_host(values: Any) -> Tensor:
    """A tensor of whole numbers in (nested) lists, which stays on the host."""
    return torch.tensor(values, dtype=torch.long, device="cpu")


def values_on_host(tensor: Tensor) -> list[Any]:
    """The values of a tensor that lies there already, in nested lists."""
    return tensor.tolist()


def fill(there: Tensor, values: Any) -> None:
    """Put host values, in nested lists, into a tensor that stays where it is. Nobody waits for it."""
    tensor = on_host(values)
    there.copy_(tensor.pin_memory() if there.is_cuda else tensor, non_blocking=True)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from one device on another. Nothing is done where it is there already. Only what goes to the host is
    waited for: it would be read before it is there."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=waits(device))


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of host values on a device. The device may still be at work on what came before: nobody waits for it.

    Args:
        values: numbers in (nested) lists, a numpy array, or a tensor on the host.
    """
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from ordinary memory the copy would wait, whatever is asked for
    return moved(tensor, device)
