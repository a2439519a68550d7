"""What is remembered of a model, and how it is noticed that the model is another: by its structure, and by a look at
what its weights hold."""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from .fingerprint import structure

T = TypeVar("T")

MOST = 8
"""structures of a model of which something is remembered: hooks and adapters come and go"""
LOOKED_AT = 64
"""values of a weight"""
GOLDEN = 0.618
"""of a row, by which each next value lies further on: so they meet in no column"""
PLAIN = (Tensor, nn.Parameter)
"""weights that lie in memory as they are; not what parametrizations, quantization and sharding make of them"""


class Remembered(Generic[T]):
    """What was found of models, each as it stands now: of a model that was changed it is found anew. Models that are
    gone are forgotten; threads may share it, and copies know nothing yet."""

    def __init__(self, numbers: bool = True, most: int = MOST) -> None:
        """
        Args:
            numbers: whether numbers that a model's modules hold make it another, as far as its forwards leave them.
            most: states of a model of which something is remembered, the latest ones.
        """
        self.numbers, self.most = numbers, most
        self._of: WeakKeyDictionary[Any, dict[Hashable, tuple[T]]] = WeakKeyDictionary()
        self._counting: WeakSet[Any] = WeakSet()
        """models whose forwards change numbers that they hold"""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Remembered, (self.numbers, self.most)

    def of(self, model: Any, find: Callable[[], T], key: Hashable = None) -> T:
        """What `find` gives, or gave of this model as it is.

        Args:
            find: may run the model.
            key: tells several things apart that are found of one model.
        """
        with self._lock:
            known, numbers = self._of.setdefault(model, {}), self.numbers and model not in self._counting
        state = _state(model, numbers)
        with self._lock:
            found = known.get((key, state))  # asked once: a structure is long
        if found is not None:
            return found[0]
        found = (find(),)  # without the lock: a hook of the model may come back here
        counts = numbers and _state(model, True) != state
        state = _state(model, False) if counts else state
        with self._lock:
            if counts:
                self._counting.add(model)
            while len(known) >= self.most:
                known.pop(next(iter(known)))
            return known.setdefault((key, state), found)[0]


def _state(model: Any, numbers: bool) -> Any:
    """Its structure; of a model that cannot be looked into, as a script, nothing is remembered."""
    try:
        return structure(model, numbers)
    except Exception:
        return object()


class Copied(Generic[T]):
    """Something made of weights, and made anew once they hold other values. A copy of this one knows nothing yet."""

    def __init__(self) -> None:
        self._made: tuple[list[Look], T] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Copied, ()

    def of(self, weights: Sequence[Tensor], make: Callable[[], T], look: bool = True) -> T:
        """What `make` makes, or made of these weights as they are.

        Args:
            look: at what they hold, for which an accelerator has to be waited for; else at where they lie.
        """
        made, same = self._made, Look.still if look else Look.stays
        if made is None or len(made[0]) != len(weights) or not all(map(same, made[0], weights)):
            self._made = made = [Look(weight) for weight in weights], make()
        return made[1]


class Look:
    """At a few values of a weight, by which it is noticed that a copy made of it is stale. Fused optimizers,
    `param.data` and merged adapters change weights where they lie, and count no version."""

    def __init__(self, weight: Tensor) -> None:
        self.place = _place(weight)
        self.whole = type(weight) in PLAIN and weight.is_contiguous() and not weight.is_meta
        """whether it can be looked at; of others every copy is stale at once"""
        if self.whole:
            self.were = seen_of(weight).clone()

    def still(self, weight: Tensor) -> bool:
        """Whether this is the same weight, and holds the same."""
        return self.whole and self.stays(weight) and seen_of(weight).equal(self.were)

    def stays(self, weight: Tensor) -> bool:
        """Whether this is the same weight, and nobody has counted a change of it."""
        return _place(weight) == self.place


def seen_of(weight: Tensor) -> Tensor:
    """Some values of a contiguous weight, where they lie: from all over its rows, and of all its columns."""
    flat, columns = weight.detach().view(-1), max(1, weight.shape[-1]) if weight.ndim else 1
    step = max(1, flat.numel() // LOOKED_AT)
    step += (int(GOLDEN * columns) - step) % columns if step > columns else 1 - step % 2
    return flat[::step]


def _place(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.stride(), 0 if weight.is_inference() else weight._version
