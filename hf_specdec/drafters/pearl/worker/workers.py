"""`Worker`: a draft model that runs beside the target, and `Workers`: where a drafter gets one for each call."""

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .wire import Link

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated


@dataclass(eq=False)
class Worker:
    """The target's end of the wire to a draft model. `Conversation` talks over it."""

    link: Link
    close: Callable[[], None]
    """ends it, at once"""
    process: subprocess.Popen | None = None
    """None where it has no process of its own here"""
    draft: Any = None
    """what a process was sent to draft with; None before it was"""
    free: Callable[[], None] | None = None
    """gives it back for later calls; None where it ends with its call"""
    epoch: int = 0
    """of the last order it was given"""


class Workers:
    """Where the draft model of a drafter runs. Workers that outlive a call wait here for the next one."""

    def __init__(self) -> None:
        self.free: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = 0
        """times that all were ended"""

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        """A worker for one call; two calls at once get one each.

        Args:
            draft: what to draft with.
            target: the target's device.

        Raises:
            OSError, RuntimeError: there is none.
        """
        raise NotImplementedError

    def reuse(self) -> Worker | None:
        """A worker that is free and alive, as far as can be told; None where there is none."""
        with self._lock:
            while self.free:
                worker = self.free.pop()
                if worker.process is None or worker.process.poll() is None:
                    return worker
                worker.close()
        return None

    def lend(self, worker: Worker) -> Worker:
        """Let a worker come back when its call is over, or end then if all are ended in between."""
        worker.free = partial(self._give_back, worker, self._closed)
        return worker

    def _give_back(self, worker: Worker, closed: int) -> None:
        with self._lock:
            if wanted := self._closed == closed:
                self.free.append(worker)
        if not wanted:
            worker.close()

    def close(self) -> None:
        """End all that are free, and those in use once they are given back. Later calls get new ones."""
        with self._lock:
            self._closed += 1
            while self.free:
                with suppress(OSError):
                    self.free.pop().close()
