"""A static cache cannot be rolled back: a dynamic one stands in for it during a call, and fills it in the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from ..target.inputs import CACHE
from .call import Call


@contextmanager
def stand_in(call: Call) -> Iterator[None]:
    """Within the block the call's cache is a dynamic one, if it was a static one whose layers see everything; what it
    held is held, and what is left there in the end is in the static one then, if anybody keeps that.

    One that moves layers to the host, or slides, stays: it is there to hold less than a dynamic one does.
    """
    static = call.model_kwargs.get(CACHE)
    whole = isinstance(static, StaticCache) and all(type(layer) is StaticLayer for layer in static.layers)
    most = call.stopping.max_length
    if not isinstance(static, StaticCache) or not whole or static.offloading or not _fits(static, most):
        yield
        return
    held = int(static.get_seq_length())
    dynamic = DynamicCache(config=call.target.config)
    for i, layer in enumerate(static.layers if held else ()):
        dynamic.update(layer.keys[:, :, :held].clone(), layer.values[:, :, :held].clone(), i)
    call.model_kwargs[CACHE] = dynamic
    try:
        yield
    finally:
        call.model_kwargs[CACHE] = static
        if call.keeps_cache and dynamic.get_seq_length():
            _fill(static, dynamic)


def _fits(static: StaticCache, most: int | None) -> bool:
    """Whether a text of so many columns does; plain decoding says what is wrong with one that does not."""
    return most is not None and most - 1 <= min(layer.max_cache_len for layer in static.layers)


def _fill(static: StaticCache, dynamic: DynamicCache) -> None:
    static.reset()
    for i, layer in enumerate(dynamic.layers):
        static.update(layer.keys, layer.values, i)
