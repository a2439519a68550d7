"""Which parts of plain decoding are as transformers has them. The engine does the work of some in another way, and asks
others otherwise: where a class or a library has changed one of these, a call is decoded plainly."""

from types import FunctionType
from typing import Any

from torch import nn

from .attention import is_stock
from .compiled import is_compiled
from .fingerprint import hooks
from .inputs import CACHE

STEPS = ("_sample", "_prefill", "_update_model_kwargs_for_generation", "_has_unfinished_sequences")
"""methods of `GenerationMixin` whose work the engine does itself"""
BY_CLASSES = "_update_model_kwargs_for_generation"
"""that which classes of transformers extend, for images and the like: they are tried as they are"""
ASKED = ("prepare_inputs_for_generation", "_optimize_model_for_decode")
"""those that it calls as plain decoding does, or for which the probe compares what it does instead"""
OF_COMPILING = ("get_compiled_call", "_valid_auto_compile_criteria")
"""those that say how plain decoding is compiled, which leaves the text as it is"""

HOOKS_OF = (
    "torch", "transformers", "accelerate", "peft", "trl", "optimum", "quanto", "torchao", "bitsandbytes", "gptqmodel",
    "compressed_tensors", "deepspeed",
)  # fmt: skip
"""packages whose hooks belong to a model as its layers do, and are tried with it"""
ANY_FORWARD = "sees_any_forward"
"""attribute by which a hook says that it does not matter which forwards it sees"""


def why_plain(model: Any) -> str:
    """What of plain decoding has been changed that the engine would leave out, or ask otherwise, in words that go on
    from the model's name; empty where it is nothing."""
    return _changed_step(model) or _changed_module(model)


def why_not_joined(model: Any) -> str:
    """The same, where rows of several calls share forwards that no `generate` is called for."""
    owner = next((base for base in type(model).__mro__ if "generate" in vars(base)), None)
    own = "generate" in vars(model) or owner is None or owner.__name__ != "GenerationMixin"
    return "has a generate of its own" if own else why_plain(model)


def _changed_step(model: Any) -> str:
    for name in STEPS:
        step = getattr(model, name, None)
        usual = name == BY_CLASSES or getattr(step, "__qualname__", "") == f"GenerationMixin.{name}"
        if step is not None and not (usual and is_stock(step)):  # older versions have fewer steps
            return f"has a {name} of its own, which speculation would leave out"
    return ""


def _changed_module(model: nn.Module) -> str:
    """A hook may count calls, press the prompt's keys or steer the last token. What it sees of drafts, of rejected
    tokens and of trials is not what it would see of plain decoding. That the whole model is compiled is another matter:
    its forwards are padded, or go without (`compiled`)."""
    for module in model.modules():
        whole = module is model
        if (module._forward_hooks or module._forward_pre_hooks or whole) and (name := _foreign_hook(module)):
            return (
                f"has a forward hook ({name}), which would see other forwards than plain decoding's; set its "
                f"attribute {ANY_FORWARD} = True if that does not matter to it"
            )
        if not whole and (module._compiled_call_impl is not None or is_compiled(module.forward)):
            return "has compiled modules, which would be compiled for each width that is verified"
    return ""


def _foreign_hook(module: nn.Module) -> str:
    """The name of a hook of which nobody knows what it does with forwards."""
    for hook in hooks(module):
        function = getattr(hook, "func", hook)  # of a partial, which holds something of one call, as of its rows
        known = function is hook and _package(function) in HOOKS_OF
        if not known and not hasattr(hook, ANY_FORWARD):
            return str(getattr(function, "__qualname__", type(function).__name__))
    return ""


def _package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def changed_cache(cache: Any) -> str:
    """What of a cache is not transformers' own: one that rounds, compresses or forgets does so by the forward, and
    several tokens at once are another forward. Empty where all is."""
    caches = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    for each in (cache, *(one for one in caches if one is not None)):
        for part in (each, *getattr(each, "layers", ())):
            methods = [f for base in type(part).__mro__ for f in vars(base).values() if isinstance(f, FunctionType)]
            if not all(map(is_stock, methods)) or {f.__name__ for f in methods} & vars(part).keys():
                return f"{CACHE} has a {type(part).__name__} with methods that are not transformers' own"
    return ""
