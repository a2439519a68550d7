"""Wrap a model's forward for a while: what metering, pacing and synthetic acceptance are made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn


@contextmanager
def wrapped_forward(model: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `model(...)` runs `around(forward, *args, **kwargs)`, `forward` being what it ran before.

    Wrappers nest; the signature that transformers inspects stays the model's own.
    """
    inner, own = model.forward, vars(model).get("forward")

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def cached_tokens(kwargs: dict[str, Any]) -> int:
    """Tokens that the cache held when a forward was called with these arguments."""
    cache = kwargs.get("past_key_values")
    return int(cache.get_seq_length()) if cache is not None else 0


def input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens per row of a forward's input."""
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return kwargs[name].shape[0], kwargs[name].shape[1]
    return args[0].shape[0], args[0].shape[1]
