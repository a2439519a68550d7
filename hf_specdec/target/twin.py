"""`twin`: a model of the same weights under another config, for the model itself may be decoding in another thread."""

import copy
from collections.abc import Container
from typing import Any

from torch import nn


def twin(module: Any, configs: dict[int, Any], only: Container[int] | None = None) -> Any:
    """The same parameters in other modules.

    Args:
        configs: by the `id` of a config, the one that takes its place.
        only: the `id` of modules that become others; the rest is shared. None for all.
    """
    if module is None or (only is not None and id(module) not in only):
        return module
    made = copy.copy(module)
    children = {name: twin(child, configs, only) for name, child in module._modules.items()}
    made.__dict__["_modules"] = children
    if id(vars(module).get("config")) in configs:
        made.__dict__["config"] = configs[id(module.config)]
    return made


def is_wrapped(model: nn.Module) -> bool:
    """Whether something has put itself around modules that hold others, which a twin would call instead of its own:
    accelerate's hooks, or `torch.compile`."""
    parts = [part for part in model.modules() if part._modules]
    return any("forward" in vars(part) or part._compiled_call_impl is not None for part in parts)
