"""Starting workers, and keeping them from call to call."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .link import LARGEST_ANSWER, Kind, Link, encode_object
from .worker import GRACE, serve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..draft_model import Translated

_log = logging.getLogger(__name__)

START_PATIENCE = 300.0
"""seconds for a process to start, which imports torch and takes over the model"""


QUIET = 2.0
"""seconds after which a word is said of a start that takes longer"""


@dataclass
class Worker:
    """Somebody at the other end of a line."""

    link: Link
    close: Callable[[], None]
    """ends it, at once"""
    process: subprocess.Popen | None = None
    """None for a thread, and for one on another rank"""
    epoch: int = 0
    """of the last order it was given"""
    draft: Any = None
    """what it was sent to draft with"""
    ready: bool = True
    """whether it has its model; a process that was launched has not"""


class Pool:
    """Workers that are free. They outlive a call; two calls at once never get the same one."""

    def __init__(self) -> None:
        self.free: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = 0
        """times that it was closed"""

    def take(self) -> Worker | None:
        """A worker that is alive, as far as can be told; None where there is none."""
        with self._lock:
            while self.free:
                worker = self.free.pop()
                if worker.process is None or worker.process.poll() is None:
                    return worker
                worker.close()
        return None

    def return_of(self, worker: Worker) -> Callable[[], None]:
        """What gives a taken worker back; or ends it, if the pool is closed in between."""
        closed = self._closed
        return lambda: self._give_back(worker, closed)

    def _give_back(self, worker: Worker, closed: int) -> None:
        with self._lock:
            if wanted := self._closed == closed:
                self.free.append(worker)
        if not wanted:
            worker.close()

    def close(self) -> None:
        """End all that are free, and those in use once they are given back. The pool may be used on."""
        with self._lock:
            self._closed += 1
            while self.free:
                with suppress(OSError):
                    self.free.pop().close()


def start_thread(draft: "PreTrainedModel | Translated", patience: float, stream: Any = None) -> Worker:
    """A worker in this process, on a CUDA stream where one is given. One that hangs in a kernel cannot be ended: it is
    left behind as a daemon."""
    mine, theirs = socket.socketpair()
    link = Link(mine, patience, LARGEST_ANSWER)
    thread = threading.Thread(target=serve, args=(Link(theirs), draft, stream), daemon=True, name="hf_specdec worker")
    thread.start()

    def close() -> None:
        link.close()
        thread.join(timeout=2 * GRACE)

    return Worker(link, close)


def launch() -> Worker:
    """A process that will be a worker. It imports what it needs meanwhile; `make_ready` gives it its model."""
    mine, theirs = socket.socketpair()
    link = Link(mine, START_PATIENCE, LARGEST_ANSWER)
    # Not multiprocessing: that would run the caller's script a second time, and leaves a helper process behind.
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {serve.__module__} import main; main({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the caller's to handle
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    theirs.close()

    def close() -> None:
        link.close()
        process.kill()
        process.wait()

    return Worker(link, close, process, ready=False)


def threads_beside(target: torch.device) -> int:
    """Threads for a draft on the CPU: as many as cores are left beside the target's, one at least. Where two models
    compute on the same cores, each one's threads wait for a core on which the other one's wait for theirs."""
    mine = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return mine if target.type != "cpu" else min(mine, max(1, cores - mine))


def make_ready(worker: Worker, draft: "PreTrainedModel | Translated", patience: float, threads: int) -> None:
    """Send a launched process its model, and wait until it has it.

    Raises:
        RuntimeError: it could not start. It is closed then, as it is when the wait is interrupted.
    """
    try:
        worker.link.send(Kind.MODEL, encode_object((draft, threads)))
        answer = worker.link.receive(QUIET) or _heard(worker.link)
        if answer is None or answer[0] is not Kind.READY:
            reason = "it did not answer" if answer is None else answer[1].decode(errors="replace")
            raise RuntimeError(f"the draft worker could not start: {reason}")
        worker.link.patience, worker.ready, worker.draft = patience, True, draft
    except BaseException:
        worker.close()
        raise


def _heard(link: Link) -> tuple[Kind, bytes] | None:
    """The answer of a worker that takes its time."""
    _log.warning("PEARL starts its draft worker in a process of its own. This takes some seconds, once per drafter")
    return link.receive(START_PATIENCE)
