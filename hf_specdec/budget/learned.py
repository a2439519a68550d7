"""What was learned from one call and serves the next, never another target."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
MOST = 64
"""keys of a target"""


class Learned(Generic[T]):
    """One `T` per target and key (a batch size: more rows take longer). Threads may share it; it forgets a target that
    is gone, and never grows beyond `MOST` keys of one."""

    is_taught = True

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: WeakKeyDictionary[Any, dict[Hashable, T]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy knows nothing yet."""
        return Learned, (self._make,)

    def of(self, target: Any, key: Hashable = None) -> T:
        """
        Args:
            target: the model; anything that can be referred to weakly, or None for one that is not at hand.
        """
        with self._lock:
            known = self._of.setdefault(self if target is None else target, {})
            if key not in known:
                while len(known) >= MOST:
                    known.pop(next(iter(known)))
                known[key] = self._make()
            return known[key]
