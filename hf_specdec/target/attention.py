"""Which functions a model's layers attend and mask with: transformers' own, or what somebody has put in their place."""

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

TAKES_MASKS = ("eager", "sdpa", "flex_attention")
"""attention that takes a 4-D mask. Others read its nonzero places as something else: on a GPU that may be an assertion
of the device, which ends the process. Nothing is tried there"""


def attention_of(model: "PreTrainedModel") -> str | None:
    """The name of the attention that a model's decoder uses, as transformers registers it."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def why_no_masks(model: "PreTrainedModel") -> str:
    """Why a model is given no 4-D masks of ours, in words that go on from its name; empty where it takes them. Without
    them there are no trees, and no rows of different lengths."""
    name = attention_of(model)
    if name not in TAKES_MASKS:
        return f"has attention ({name}) that does not accept custom masks"
    attends, masks = functions_of(model)
    if not (attends is None and name == "eager") and not is_stock(attends):
        return f"has attention ({name}) that is not transformers' own"
    masks_by_name = [f for of in classes(model) for called, f in named_by(of).items() if "mask" in called]
    if not all(map(is_stock, [masks, *masks_by_name])):
        return "masks by a function that is not transformers' own"
    return ""


def functions_of(model: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """By which a model attends and masks; None for what is registered nowhere, as "eager" is each model's own."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention_of(model)
    attends = ALL_ATTENTION_FUNCTIONS.get(name)
    attends = getattr(attends, "stock", attends)  # within a block of ours, what it stands for
    return attends, ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def is_stock(function: Any) -> bool:
    """Whether transformers wrote a function or method, and nobody has put another one around or in place of it."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_home())


@cache
def _home() -> str:
    import transformers

    return os.path.dirname(transformers.__file__) + os.sep


def classes(model: "nn.Module") -> set[type]:
    """Of a model and of all modules in it."""
    return set(map(type, model.modules()))


def named_by(of: type) -> dict[str, Any]:
    """Functions that a class's forward calls by name, as its file has them now."""
    forward: Any = inspect.unwrap(inspect.getattr_static(of, "forward", None))  # type: ignore[arg-type]
    around = getattr(forward, "__globals__", {})
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return {name: around[name] for name in names if callable(around.get(name))}
