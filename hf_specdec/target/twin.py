"""`twin`: a model of the same weights under another config, for the model itself may be decoding in another thread."""

import copy
from typing import Any

from torch import nn


def twin(module: Any, configs: dict[int, Any]) -> Any:
    """The same parameters in other modules.

    Args:
        configs: by the `id` of a config, the one that takes its place.
    """
    made = copy.copy(module)
    children = {name: child if child is None else twin(child, configs) for name, child in module._modules.items()}
    made.__dict__["_modules"] = children
    if id(vars(module).get("config")) in configs:
        made.__dict__["config"] = configs[id(module.config)]
    return made


def is_wrapped(model: nn.Module) -> bool:
    """Whether something has put itself around modules that hold others, which a twin would call instead of its own:
    accelerate's hooks, or `torch.compile`."""
    parts = [part for part in model.modules() if part._modules]
    return any("forward" in vars(part) or part._compiled_call_impl is not None for part in parts)
