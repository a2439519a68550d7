"""Linear layers of a model on the CPU, their weights kept in the layout that oneDNN multiplies fastest.

With plain weights a call of a few tokens, such as a verification, costs much more than one of a single token; with
packed ones little more.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpeculationError
from .devices import DTYPES, cpu_capabilities, cpu_dtype


class PackedLinear(nn.Linear):
    """An `nn.Linear` that holds its weight packed, too: parameters, ties and state_dict are what they were.

    It packs in its first call, and again once the weight has changed. Where gradients are wanted, under autocast, or
    once the weight has become one that cannot be packed, it is the plain layer.
    """

    packed: tuple[tuple[int, int, torch.dtype], Tensor] | None = None
    """what the weight was when it was packed (place, version and dtype), and the packed weight"""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]"""
        weight = self.weight
        if _plainly() or not (_packable(weight) and input.dtype == weight.dtype and input.is_cpu and input.numel()):
            return super().forward(input)
        now = (weight.data_ptr(), 0 if weight.is_inference() else weight._version, weight.dtype)
        packed = self.packed
        if packed is None or packed[0] != now:
            self.packed = packed = now, torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return torch.ops.mkldnn._linear_pointwise(input, packed[1], self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        """Without what is packed, which cannot be copied: a copy packs for itself."""
        return {name: value for name, value in vars(self).items() if name != "packed"}


def pack_linear(model: nn.Module) -> int:
    """Make every `nn.Linear` of a model a `PackedLinear`, in place. Outputs are the same within the dtype's rounding.

    The plain weights stay, for whoever saves, trains or unpacks the model. Of a model loaded from safetensors they are
    pages of the file, which the system can drop; of any other, packed layers take twice the memory. A weight changed
    through `.data` goes unnoticed: unpack before, and pack again.

    Returns:
        How many layers were packed; 0 if all were already.

    Raises:
        SpeculationError: a layer's weight is not on the CPU in float32 (or in bfloat16, where the CPU multiplies it),
            there is no layer, or torch has no oneDNN.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in (nn.Linear, PackedLinear)]
    if not layers:
        raise SpeculationError(f"pack_linear finds no nn.Linear in {type(model).__name__}; leave it out")
    for weight in (layer.weight for layer in layers):
        if not _packable(weight):
            raise SpeculationError(
                f"pack_linear needs weights on the CPU in {' or '.join(packable_dtypes())}, got "
                f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}; load the model that way, or "
                "leave pack_linear out"
            )
    if not torch.backends.mkldnn.is_available():
        raise SpeculationError("pack_linear needs a torch that was built with oneDNN; leave it out")
    return _turn(model, nn.Linear, PackedLinear)


def unpack_linear(model: nn.Module) -> int:
    """Undo `pack_linear`.

    Returns:
        How many layers were packed.
    """
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop("packed", None)
    return _turn(model, PackedLinear, nn.Linear)


def is_packed(model: nn.Module) -> bool:
    """Whether layers of it hold packed weights."""
    return any(type(module) is PackedLinear for module in model.modules())


def _turn(model: nn.Module, old: type[nn.Linear], new: type[nn.Linear]) -> int:
    """The modules themselves stay, so whoever refers to one of them need not know."""
    layers = [module for module in model.modules() if type(module) is old]
    for layer in layers:
        layer.__class__ = new
    return len(layers)


def _plainly() -> bool:
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


def _packable(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in packable_dtypes().values()


@cache
def packable_dtypes() -> dict[str, torch.dtype]:
    """By name, what the CPU itself multiplies."""
    return {name: DTYPES[name] for name in dict.fromkeys(["float32", cpu_dtype(cpu_capabilities())])}
