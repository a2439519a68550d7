"""`fingerprint` tells whether a model is still what a recording was made of; `Replayed` lets those look on who have put
themselves around its forward."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTERS = ("scaling", "merged_adapters", "_active_adapter")
"""what PEFT's layers hold in dictionaries and lists"""

NOTING = "transformers.utils.output_capturing"
"""where transformers' hooks come from that note hidden states, from the first call on that asks for these"""
NOTED = "_output_capturing_hooks_installed"
"""of a model that has them"""

T = TypeVar("T")


class Replayed(Protocol):
    """Of a stand-in for a model's `forward` that looks on: it may have an attribute `replayed`, which is called around
    whatever is replayed."""

    def __call__(self, run: Callable[[], T], rows: int, width: int, held: int, times: int) -> T:
        """
        Args:
            run: gives what is to be returned.
            rows: of a forward, with `width` tokens each behind `held` others.
            times: forwards, one after the other.
        """


def fingerprint(model: "PreTrainedModel") -> int:
    """Of everything that a captured forward would not notice: where weights lie, numbers that modules hold, what is
    hooked into the model, and which attention and precision it uses. Another one, other captures."""
    parts: list[Any] = [_attention(model), model.dtype, torch.get_float32_matmul_precision()]
    parts.append(torch.backends.cuda.matmul.allow_tf32)
    return hash(str(parts + state_of(model)))


def state_of(modules: torch.nn.Module) -> list[Any]:
    """Of a module and all in it: where weights lie, numbers that are held, and hooks."""
    parts: list[Any] = []
    for module in modules.modules():
        own = vars(module)
        parts += [id(module), id(replaced(module)), len(hooks(module))]
        parts += [v for name, v in own.items() if isinstance(v, (bool, int, float, str)) and name != NOTED]
        parts += [own.get(name) for name in ADAPTERS]
        for held in (*module._parameters.values(), *module._buffers.values()):
            parts.append(None if held is None or held.device.type == "meta" else held.data_ptr())
    return parts


def _attention(model: "PreTrainedModel") -> tuple[Any, Any]:
    configs = model.config, model.config.get_text_config(decoder=True)
    return tuple(getattr(config, "_attn_implementation", "") for config in configs)  # type: ignore[return-value]


def hooks(module: Any) -> list[Any]:
    """What is called before and after a module's forward. Not what only notes hidden states, which a recording has, and
    not what serves one forward of one thread."""
    found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [h for h in found if getattr(h, "__module__", "") != NOTING and not hasattr(h, "of_one_forward")]


def replaced(module: Any) -> Any:
    """What stands in place of a module's forward, if that does more than look on."""
    found = vars(module).get("forward")
    while getattr(found, "replayed", None) is not None:
        found = found.inner
    return None if getattr(found, "__func__", None) is type(module).forward else found
