"""A static cache cannot be rolled back: a dynamic one stands in for it during a call, and fills it in the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import DynamicCache, StaticCache

from ..target.inputs import CACHE, cached_columns
from .call import Call
from .modes import lacks


@contextmanager
def stand_in(call: Call) -> Iterator[None]:
    """Within the block a static cache of the call is a dynamic one. What it held is held, and what is left there in the
    end is in the static one then, if anybody keeps that."""
    given = call.model_kwargs.get(CACHE)
    if not isinstance(given, StaticCache) or lacks(call, given):
        yield
        return
    held = cached_columns(given)
    dynamic = DynamicCache(config=call.target.config)
    for i, layer in enumerate(given.layers if held else ()):
        dynamic.update(layer.keys[:, :, :held].clone(), layer.values[:, :, :held].clone(), i)
    call.model_kwargs[CACHE] = dynamic
    try:
        yield
    finally:
        call.model_kwargs[CACHE] = given
        if call.keeps_cache and dynamic.get_seq_length():
            _fill(given, dynamic)


def _fill(static: StaticCache, dynamic: DynamicCache) -> None:
    static.reset()
    for i, layer in enumerate(dynamic.layers):
        static.update(layer.keys, layer.values, i)
