"""Linear layers of a model on the CPU, their weights kept in the layout that oneDNN multiplies fastest.

With plain weights a call of a few tokens, such as a verification, costs much more than one of a single token; with
packed ones little more.
"""

import threading
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import SpeculationError
from .devices import DTYPES, cpu_capabilities, cpu_dtype
from .remembered import PLAIN, Look, seen_of

SELDOM = 4
"""of the values of a look one in so many is seen in every call: they lie far apart, and each is waited for"""


class PackedLinear(nn.Linear):
    """An `nn.Linear` that multiplies with its weight packed: parameters, ties and state_dict are what they were.

    It packs in its first call, and again once the weight has changed. Where gradients are wanted, under autocast, or
    where the weight is one that cannot be packed, it is the plain layer.
    """

    packing: Any  # `Packing`; nn.Module says that attributes are tensors or modules

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]"""
        weight = self.weight
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling():
            self.packing.forget()  # what is trained now is another weight soon
        plainly = _plainly() or type(input) not in PLAIN or not (input.is_cpu and input.numel())
        packed = None if plainly or input.dtype != weight.dtype else self.packing.of(weight)
        if packed is None:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, packed, self.bias, "none", [], "")


class Packing:
    """A layer's weight, packed for as long as it stays the same: a look at some of its values tells, in every call."""

    def __init__(self, model: "PackedModel") -> None:
        self.model = model
        self.kept: tuple[Tensor, Look, tuple[Tensor, Tensor], Tensor] | None = None
        """the weight, a look at it, the few of its values that every call sees, and the packed weight"""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy packs for itself."""
        return Packing, (self.model,)

    def of(self, weight: Tensor) -> Tensor | None:
        """The packed weight, as the weight is now; None where it cannot be packed."""
        if (kept := self.kept) is not None:
            (few, were), look = kept[2], kept[1]
            if weight is kept[0] and look.stays(weight) and few.equal(were):
                return kept[3]
            self.model.forget()
        look = Look(weight)
        if not (look.whole and type(weight) is nn.Parameter and _packable(weight)):
            return None
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        few = seen_of(weight)[::SELDOM]
        self.kept = weight, look, (few, few.clone()), packed
        self.model.add(self)
        return packed

    def forget(self) -> None:
        """Pack anew in the next call."""
        self.kept = None


class PackedModel:
    """Layers of one model: once a weight has changed all are packed anew. In half precision a step of training may
    leave most values of a layer as they are, but not all that the layers look at together."""

    def __init__(self) -> None:
        self._layers: WeakSet[Packing] = WeakSet()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedModel, ()

    def add(self, layer: Packing) -> None:
        """It was packed."""
        with self._lock:
            self._layers.add(layer)

    def look(self) -> None:
        """Pack all anew if one has changed."""
        with self._lock:
            kept = [layer.kept for layer in self._layers]
        if not all(each is None or each[1].still(each[0]) for each in kept):
            self.forget()

    def forget(self) -> None:
        """Pack all anew."""
        with self._lock:
            layers = list(self._layers)
            self._layers.clear()
        for layer in layers:
            layer.forget()


def look_at(model: nn.Module) -> None:
    """Before a text: see that what is packed of a model's layers, all together, is of their weights as they are."""
    for packed in {id(m.packing.model): m.packing.model for m in model.modules() if type(m) is PackedLinear}.values():
        packed.look()


def pack_linear(model: nn.Module) -> int:
    """Make every `nn.Linear` of a model a `PackedLinear`, in place. Outputs are the same within the dtype's rounding.

    The plain weights stay, for whoever saves, trains or unpacks the model. Of a model loaded from safetensors they are
    pages of the file, which the system can drop; of any other, packed layers take twice the memory. A weight that has
    changed, by training, `param.data` or a merged adapter, is packed anew: some of its values are looked at in each
    call, so that a change of few of them through `.data` may go unnoticed.

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
    packed = PackedModel()
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.packing = Packing(packed)  # type: ignore[assignment]
    return _turn(model, nn.Linear, PackedLinear)


def unpack_linear(model: nn.Module) -> int:
    """Undo `pack_linear`.

    Returns:
        How many layers were packed.
    """
    for module in model.modules():
        if type(module) is PackedLinear:
            vars(module).pop("packing")
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
