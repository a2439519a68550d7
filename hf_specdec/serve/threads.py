"""Work that leaves no workers of OpenMP behind."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Do it in a thread that ends with it.

    OpenMP keeps workers for every thread that ever had some; beside those of a thread that decodes all day they cost it
    a fifth of its speed and more on a CPU of few cores.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # who interrupts the program need not wait for it
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
