"""`structure` tells whether a model still computes as it did, `fingerprint` whether a recording of it still holds."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from .attention import classes, functions_of, named_by

ADAPTERS = ("scaling", "merged_adapters", "_active_adapter")
"""what PEFT's layers hold in dictionaries and lists"""

NOTING = "transformers.utils.output_capturing"
"""where transformers' hooks come from that note hidden states, from the first call on that asks for these"""
NOTED = "_output_capturing_hooks_installed"
"""of a model that has them"""
OWN = {"forward", "_compiled_call_impl", *ADAPTERS}
"""attributes that few modules have"""


def structure(model: nn.Module, numbers: bool = True) -> tuple[Any, ...]:
    """Of all that decides how a model computes, apart from what its weights hold: modules and their code, hooks,
    functions that attend and mask, shapes, kinds and devices of weights, and numbers that modules hold.

    Args:
        numbers: whether the latter count, which the forwards of some models change.
    """
    parts, kinds = _surroundings(model), (bool, str, int, float) if numbers else (bool, str)
    if (config := getattr(model, "config", None)) is not None:
        settings = vars(config.get_text_config(decoder=True))
        parts += [value for value in settings.values() if type(value) in kinds]
    for module in model.modules():
        own = dict(vars(module))  # other threads' hooks come and go
        parts += [id(module), type(module)]
        parts += [value for name, value in own.items() if type(value) in kinds and name != NOTED]
        if not OWN.isdisjoint(own):
            parts += [id(there) for there in (replaced(module), module._compiled_call_impl) if there is not None]
            parts += [str(own[name]) for name in ADAPTERS if name in own]
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            parts += [number for of in _hooks(module) for number, hook in list(of.items()) if _counts(hook)]
        for held in (*module._parameters.values(), *module._buffers.values()):
            parts += (None,) if held is None else (type(held), held.shape, held.dtype, held.device)
    return tuple(parts)


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Of everything that a recorded forward would not notice: the structure, and where weights lie. Another one, other
    recordings."""
    held = (each for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values()))
    return (*structure(model), *(each.data_ptr() for each in held if each is not None and each.device.type != "meta"))


def _surroundings(model: nn.Module) -> list[Any]:
    """What modules do not hold themselves: code of classes, functions that are looked up, hooks and switches of all."""
    parts: list[Any] = [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32]
    for kind in ("cpu", "cuda"):
        parts.append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
    parts += [*nn_module._global_forward_pre_hooks, None, *nn_module._global_forward_hooks]
    if hasattr(model, "config"):
        parts += map(id, functions_of(model))
    for of in classes(model):
        parts += [id(vars(of).get("forward")), *map(id, named_by(of).values())]
    return parts


def hooks(module: nn.Module) -> list[Any]:
    """What is called before and after a module's forward, and is to be called each time."""
    of_all = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
    return [hook for of in (*_hooks(module), *of_all) for hook in list(of.values()) if _counts(hook)]


def is_looked_on(module: nn.Module) -> bool:
    """Whether something is called before or after the next forward, and be it that one alone."""
    return any(_is_seen(hook) for of in _hooks(module) for hook in list(of.values()))


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """By numbers, of which none is given twice."""
    return module._forward_pre_hooks, module._forward_hooks


def _counts(hook: Any) -> bool:
    """Not what serves one forward of one thread."""
    return _is_seen(hook) and not hasattr(hook, "of_one_forward")


def _is_seen(hook: Any) -> bool:
    """Not what only notes hidden states, which a recording has."""
    return getattr(hook, "__module__", "") != NOTING


def replaced(module: Any) -> Any:
    """What stands in place of a module's forward, if that does more than look on."""
    found = vars(module).get("forward")
    while getattr(found, "__dict__", {}).get("replayed") is not None:
        found = found.inner
    return None if getattr(found, "__func__", None) is type(module).forward else found
