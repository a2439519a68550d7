"""`fingerprint` tells whether a model is still what a recording was made of; `Replayed` lets those look on who have put
themselves around its forward."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    """Of everything that a captured forward would not notice: where weights lie, what is hooked into the model, and
    which attention it uses. Another one, other captures."""
    parts: list[Any] = [getattr(model.config, "_attn_implementation", ""), model.training, model.dtype]
    for module in model.modules():
        parts += [id(module), id(replaced(module)), hasattr(module, "_hf_hook")]
        parts += [len(module._forward_hooks), len(module._forward_pre_hooks)]
        parts += [getattr(module, name, None) for name in ("_active_adapter", "_disable_adapters", "merged_adapters")]
        for held in (*module._parameters.values(), *module._buffers.values()):
            parts.append(None if held is None or held.device.type == "meta" else held.data_ptr())
    return hash(str(parts))


def replaced(module: Any) -> Any:
    """What stands in place of a module's forward, if that does more than look on."""
    found = vars(module).get("forward")
    while getattr(found, "replayed", None) is not None:
        found = found.inner
    return None if getattr(found, "__func__", None) is type(module).forward else found
