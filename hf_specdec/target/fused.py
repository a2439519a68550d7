"""`fused`: a model whose small operations are compiled, each chain of them into one kernel: norms, rotary embeddings,
and what stands between the products of an MLP.

It is a twin of the same weights, so the user's model stays what it was, in all threads and afterwards. A piece is
compiled for one token and for any number of them, once for all layers, rows and widths.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import shown, warn
from .attention import classes, is_stock, named_by
from .devices import input_device
from .probe import why_not_over
from .ragged import RaggedRunner
from .remembered import Remembered
from .twin import twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Function = Callable[..., Any]
Compiler = Callable[[Function], Function]

ROTARY = "apply_rotary_pos_emb"
TURNED = ("q", "k", "cos", "sin")
"""what it is given"""
GATED = ("down_proj", "act_fn", "gate_proj", "up_proj")
"""names in the code of an MLP, in this order: down(act(gate(x)) * up(x))"""


def _by_inductor(function: Function) -> Function:
    """Rounded in half precision wherever separate operations are. Steps are recorded by us."""
    return torch.compile(function, options={"emulate_precision_casts": True, "triton.cudagraphs": False})


COMPILERS: dict[str, Compiler] = {"cuda": _by_inductor}
"""by kind of device; elsewhere nothing is fused"""

_fusing: Remembered["Fusing | None"] = Remembered()


def fused(model: "PreTrainedModel") -> "PreTrainedModel":
    """What computes a model's forwards over static buffers: a fused twin, whose kernels stay as long as the model as it
    is; the model itself where nothing can be fused, or what is computes something else."""
    compiler = COMPILERS.get(input_device(model).type)
    fusing = None if compiler is None else _fusing.of(model, lambda: _tried(model, Fusing(compiler)))
    return model if fusing is None else fusing.twin(model)


def _tried(model: "PreTrainedModel", fusing: "Fusing") -> "Fusing | None":
    """What fuses it, once its twin gave the model's logits; all that it needs is compiled then."""
    try:
        if all(fusing.of(kind) is kind for kind in classes(model)):
            return None
        differs = why_not_over(model, lambda tried, *given: RaggedRunner(fusing.twin(tried), *given))
    except Exception as error:  # of a compiler that lacks something here
        warn(f"small operations of {type(model).__name__} are not fused: {shown(error)}. The text is not affected")
        return None
    return None if differs else fusing


class Fusing:
    """Classes of modules whose forwards are fused, by those that they stand for, for one model: how often torch
    compiles a function is bounded."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.classes: dict[type, type] = {}

    def twin(self, model: "PreTrainedModel") -> "PreTrainedModel":
        made = twin(model, {})
        vars(made).pop("forward", None)  # what looks on would run the model itself
        for part in made.modules():
            if (kind := self.of(type(part))) is not type(part):
                part.__class__ = kind
        return made  # type: ignore[no-any-return]

    def of(self, kind: type) -> type:
        """The class that stands for one; itself where nothing is to be fused."""
        if kind not in self.classes:
            forward = next(filter(None, (way(kind, self.compiler) for way in (_norm, _mlp, _attention))), None)
            self.classes[kind] = type(kind.__name__, (kind,), {"forward": forward}) if forward else kind
        return self.classes[kind]


def _norm(kind: type[Any], compiler: Compiler) -> Function | None:
    """The forward of an RMSNorm; None for another module, here and below."""
    if not (kind.__name__.endswith("RMSNorm") and _takes_one(kind)):
        return None
    normed = compiler(_copy(kind.forward))

    def forward(self: Any, states: Tensor) -> Tensor:
        return normed(self, _of_any_number(states.reshape(-1, states.shape[-1]))).view(states.shape)

    return forward


def _mlp(kind: type[Any], compiler: Compiler) -> Function | None:
    if not (_takes_one(kind) and kind.forward.__code__.co_names == GATED):
        return None
    gated = compiler(_copy(_gated))

    def forward(self: Any, states: Tensor) -> Tensor:
        gate, up = self.gate_proj(states), self.up_proj(states)
        several = (_of_any_number(each.flatten(0, -2)) for each in (gate, up))
        return self.down_proj(gated(self.act_fn, *several).view(gate.shape))

    return forward


def _gated(act: Function, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _attention(kind: type[Any], compiler: Compiler) -> Function | None:
    """As it is, but that it finds another rotary embedding by its name."""
    rotary: Any = named_by(kind).get(ROTARY)
    forward = inspect.unwrap(kind.forward)
    if not (is_stock(forward) and is_stock(rotary) and tuple(inspect.signature(rotary).parameters)[:4] == TURNED):
        return None
    compiled = compiler(_copy(rotary))

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, ...]:
        rows, _, width, _ = q.shape
        if more or options or {(rows, width)} != {cos.shape[:2], sin.shape[:2]}:
            return rotary(q, k, cos, sin, *more, **options)
        heads = [each.transpose(1, 2).flatten(0, 1)[:, :, None] for each in (q, k)]  # [N, heads, 1, size]
        waves = [each.flatten(0, 1)[:, None] for each in (cos, sin)]  # [N, 1, size]
        found = compiled(*map(_of_any_number, heads + waves))
        return tuple(each.squeeze(2).unflatten(0, (rows, width)).transpose(1, 2) for each in found)

    return _copy(forward, {ROTARY: turned})


def _takes_one(kind: type[Any]) -> bool:
    """Whether transformers wrote the forward, and it takes one thing."""
    forward = kind.forward
    return is_stock(forward) and forward.__code__.co_argcount == 2


def _copy(function: Any, names: dict[str, Any] | None = None) -> Any:
    """A function with code of its own, by which torch counts how often it compiled one.

    Args:
        names: others that it finds by these names.
    """
    around = {**function.__globals__, **names} if names else function.__globals__
    code, defaults = function.__code__.replace(), function.__defaults__
    copied = FunctionType(code, around, function.__name__, defaults, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _of_any_number(states: Tensor) -> Tensor:
    """States [N, ...] of any N, as if they were nobody's view: torch would compile for each way in which they lie."""
    states = states.detach().contiguous()
    if len(states) > 1:
        torch._dynamo.maybe_mark_dynamic(states, 0)
    return states
