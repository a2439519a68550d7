"""`begin`: layers of no columns for a stock cache, as a model's first forward would leave them. What they hold is found
without values, so that the first of several calls computes as all do."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from .cache import holding, is_adoptable
from .devices import input_device
from .inputs import CACHE
from .remembered import Remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class States(NamedTuple):
    """A layer's keys or values."""

    heads: int
    size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, states: Tensor) -> "States":
        return cls(states.shape[1], states.shape[3], states.dtype)

    def empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty(rows, self.heads, 0, self.size, dtype=self.dtype, device=device)


_layouts: Remembered[list[tuple[States, States]]] = Remembered()


def begin(stock: Cache, model: "PreTrainedModel", rows: int) -> bool:
    """Give the layers of an unused cache states of no columns; whether they are what the model's own cache has."""
    layers, layout = holding(stock), _layouts.of(model, lambda: _tried(model))
    if not is_adoptable(stock) or len(layers) != len(layout):
        return False
    device = input_device(model)
    for layer, both in zip(layers, layout, strict=True):
        keys, values = (states.empty(rows, device) for states in both)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return True


def _tried(model: "PreTrainedModel") -> list[tuple[States, States]]:
    """Of each layer that holds something, after one token."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports far more than all of this package

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        cache: Any = DynamicCache(config=model.config)
        token = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
        model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=True, **{CACHE: cache})
    return [(States.of(layer.keys), States.of(layer.values)) for layer in holding(cache)]
