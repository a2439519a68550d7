"""Models of one kind are tried once in a session: how their forwards can be run does not depend on their weights."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_specdec.target import capturable, fingerprint, probe

NUMBERS = (bool, str, int, float)
FOUND: dict[Any, Any] = {}
"""by who tries and kind"""


def kind_of(model: Any) -> Any:
    """All that a trial goes by, but for weights; None of a model with hooks or methods of its own, or a broken one."""
    if not isinstance(model, PreTrainedModel) or any(map(inspect.ismethod, vars(model).values())):
        return None
    config = model.config
    parts = [type(model), config.to_json_string(use_diff=False), config._attn_implementation]
    parts += fingerprint._surroundings(model)
    for module in model.modules():
        own = vars(module)
        if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] or module._compiled_call_impl:
            return None
        held = [*module._parameters.values(), *module._buffers.values()]
        if not all(value is None or value.sum().isfinite() for value in held):
            return None
        parts += [type(module), *(value for value in own.values() if type(value) in NUMBERS)]
        parts += [value is not None and (value.shape, value.dtype, value.device) for value in held]
    return tuple(parts)


@contextmanager
def tried_once() -> Iterator[None]:
    """Of each kind what the first one showed is what all show."""

    def once(name: str, of_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def of(model: Any) -> Any:
            if (kind := kind_of(model)) is None:
                return of_one(model)
            if (name, kind) not in FOUND:
                FOUND[name, kind] = of_one(model)
            return FOUND[name, kind]

        return of

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((probe, "_probe"), (capturable, "_fails")):
            patch.setattr(module, name, once(name, getattr(module, name)))
        yield
