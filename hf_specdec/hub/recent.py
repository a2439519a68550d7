"""`Recent`: the last few drafters that flags asked for, each made once however many threads ask for it."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from .registry import Storable


class Recent:
    """Drafters by key; beyond `most` the least recently used is forgotten, and ends when no call uses it any more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._made: dict[Hashable, tuple[Any, Future[Storable]]] = {}  # the latest last
        self._lock = threading.Lock()  # never held while a drafter is made

    def get(self, key: Hashable, assistant: Any, make: Callable[[], Storable]) -> Storable:
        """The drafter of this key over this draft model, from `make` if it is not here.

        Who asks for one that is being made waits for it, and gets its error if it fails; nobody else waits.
        """
        with self._lock:
            known, drafter = self._made.pop(key, (None, None))
            mine = drafter is None or known is not assistant
            drafter = Future() if drafter is None or mine else drafter
            self._made[key] = assistant, drafter
        if mine:
            self._fill(key, drafter, make)
        return drafter.result()

    def _fill(self, key: Hashable, drafter: "Future[Storable]", make: Callable[[], Storable]) -> None:
        try:
            drafter.set_result(make())
        except BaseException as error:
            with self._lock:
                if key in self._made and self._made[key][1] is drafter:
                    del self._made[key]  # the next call tries anew
            drafter.set_exception(error)
        else:
            with self._lock:
                for oldest in list(self._made)[: -self.most]:
                    del self._made[oldest]
