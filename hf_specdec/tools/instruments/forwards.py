"""Wrap a model's forward for a while, as the meter does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from torch import nn

from ...target.inputs import CACHE, cached_columns
from ...target.recorded import Replayed


class WrappedForward:
    """Stands in for a model's `forward`, with its signature; a pickled model gets its own forward back."""

    def __init__(self, model: nn.Module, around: Callable[..., Any], replayed: Replayed | None = None) -> None:
        update_wrapper(self, model.forward)
        self.model, self.inner, self.around = model, model.forward, around
        self.replayed = replayed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.inner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "forward")  # looked up before the copy has any attributes: its class's own


@contextmanager
def wrapped_forward(model: nn.Module, around: Callable[..., Any], replayed: Replayed | None = None) -> Iterator[None]:
    """Inside the block, `model(...)` runs `around(forward, *args, **kwargs)`, where `forward` is what it ran before.

    Wrappers nest. The signature that transformers inspects stays the model's own.

    Args:
        replayed: of a wrapper that only looks on: called around forwards that are replayed. None where forwards must
            not be captured.
    """
    own = vars(model).get("forward")
    model.forward = WrappedForward(model, around, replayed)
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def cached_tokens(kwargs: dict[str, Any]) -> int:
    """Tokens that the cache held when a forward was called with these arguments."""
    cache = kwargs.get(CACHE)
    return 0 if cache is None else cached_columns(cache)


def input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens per row of a forward's input."""
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return kwargs[name].shape[0], kwargs[name].shape[1]
    return args[0].shape[0], args[0].shape[1]
