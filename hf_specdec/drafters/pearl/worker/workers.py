"""`Worker`: a draft model that runs beside the target, and `Workers`: where a drafter gets one for each call."""

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....errors import shown
from . import serving
from .wire import Link

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

_log = logging.getLogger(__name__)

START_PATIENCE = 300.0
"""seconds for a process to start, which imports torch and takes over the model"""
GRACE = 10.0
"""seconds for a draft step that has become useless to end"""
QUIET = 2.0
"""seconds after which a start that takes longer is mentioned"""


@dataclass(eq=False)
class Worker:
    """The target's end of the wire to a draft model."""

    link: Link
    close: Callable[[], None]
    """ends it, at once"""
    process: subprocess.Popen | None = None
    """None where it has no process of its own here"""
    draft: Any = None
    """what a process was sent to draft with; None before it was"""
    orders: int = 0
    """that it was given, in all calls"""


class Workers:
    """Where the draft model of a drafter runs. A thread ends with its call; on a GPU all of them draft on one CUDA
    stream of their own. Processes wait here for the next call, and the first one starts at once, so that the first call
    does not wait for its imports."""

    def __init__(self, in_threads: bool) -> None:
        self.in_threads = in_threads
        self.stream: Any = None
        self.free: list[Worker] = [] if in_threads else [launched()]
        self.lent: set[Worker] = set()
        """processes at work, unless all were closed since"""
        self._lock = threading.Lock()

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        """A worker for one call; two calls at once get one each.

        Args:
            draft: what to draft with.
            target: the target's device.

        Raises:
            OSError, RuntimeError: there is none.
        """
        if self.in_threads:
            self.stream = serving.stream_for(draft, self.stream)
            return started(draft, self.stream)
        worker = self.reuse()
        if worker is not None and worker.draft not in (None, draft):
            worker.close()  # it was sent the model with another translation, or none
            worker = None
        worker = worker or launched()
        if worker.draft is None:
            make_ready(worker, draft, threads_beside(target))
        self.lent.add(worker)
        return worker

    def reuse(self) -> Worker | None:
        """A worker that is free and alive, as far as can be told; None where there is none."""
        with self._lock:
            while self.free:
                worker = self.free.pop()
                if worker.process is None or worker.process.poll() is None:
                    return worker
                worker.close()
        return None

    def give_back(self, worker: Worker, good: bool) -> None:
        """A call is over. Its worker waits for the next one, or is ended.

        Args:
            good: whether it can be used again.
        """
        with self._lock:
            if kept := good and worker in self.lent:
                self.free.append(worker)
            self.lent.discard(worker)
        if not kept:
            worker.close()

    def close(self) -> None:
        """End all that are free, and those in use once they are given back. Later calls get new ones."""
        with self._lock:
            self.lent.clear()
            while self.free:
                with suppress(OSError):
                    self.free.pop().close()


def started(draft: "PreTrainedModel | Translated", stream: Any) -> Worker:
    """A worker in a thread."""
    mine, theirs = socket.socketpair()
    link, arguments = Link(mine), (Link(theirs), draft, stream)
    thread = threading.Thread(target=serving.serve, args=arguments, daemon=True, name="hf_specdec worker")
    thread.start()

    def close() -> None:
        link.close()
        thread.join(GRACE)  # one that hangs in a kernel cannot be ended: it is left behind

    return Worker(link, close)


def launched() -> Worker:
    """A worker in a process. It imports what it needs; `make_ready` gives it its model."""
    mine, theirs = socket.socketpair()
    link = Link(mine)
    # Not multiprocessing: that would run the caller's script a second time, and leaves a helper process behind.
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {serving.__name__} import main; main({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,  # which ends with this process
        process_group=0,  # Ctrl-C is the caller's to handle
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    theirs.close()

    def close() -> None:
        link.close()
        process.kill()
        process.communicate()

    return Worker(link, close, process)


def make_ready(worker: Worker, draft: "PreTrainedModel | Translated", threads: int) -> None:
    """Send a launched process its model, and wait until it has it.

    Raises:
        RuntimeError: it could not start. It is closed then, as it is when the wait is interrupted.
    """
    try:
        worker.link.doubt(START_PATIENCE)
        worker.link.send("model", draft, threads)
        if not worker.link.connection.poll(QUIET):
            _log.warning("PEARL starts its draft worker in a process. This takes some seconds, once per drafter")
        if (answer := worker.link.receive()) != ("ready",):
            reason = "it did not answer" if answer is None else answer[-1]
            raise RuntimeError(f"the draft worker could not start: {reason}")
        worker.draft = draft
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        worker.close()
        raise RuntimeError(f'draft_model cannot be sent to a process ({shown(error)}); use worker="thread"') from error
    except BaseException:
        worker.close()
        raise


def threads_beside(target: torch.device) -> int:
    """How many threads a draft on the CPU computes with: one for each core that the target leaves, at least one.

    Where two models compute on the same cores, the threads of one wait for cores on which threads of the other wait.
    """
    mine = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return mine if target.type != "cpu" else min(mine, max(1, cores - mine))
