"""A model that its user has compiled: by `model.compile()`, or by `model.forward = torch.compile(model.forward)`."""

import copy
from typing import Any

from .fingerprint import replaced


def is_compiled(forward: Any) -> bool:
    """Whether `torch.compile` made it, and not `torch.compiler.disable`."""
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def compiles(model: Any) -> bool:
    """Whether torch compiles a model's forward for the shapes that it meets, up to a limit."""
    return model._compiled_call_impl is not None or is_compiled(model.forward)


def uncompiled(model: Any) -> Any:
    """The same model without that, for forwards of shapes that are not to be compiled for: a copy that shares its
    modules."""
    if not compiles(model):
        return model
    made = copy.copy(model)
    made._compiled_call_impl = None
    if is_compiled(model.forward):
        made.forward = model.forward._torchdynamo_orig_callable
        if replaced(made) is None:
            del made.forward
    return made
