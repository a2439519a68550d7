"""A draft model in a process of its own, which is kept from call to call."""

import gc
import importlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from ....errors import shown
from .serving import serve
from .wire import Kind, Link, encode
from .workers import Worker, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

_log = logging.getLogger(__name__)

START_PATIENCE = 300.0
"""seconds for a process to start, which imports torch and takes over the model"""
QUIET = 2.0
"""seconds after which a start that takes longer is mentioned"""


class Processes(Workers):
    """Worker processes. The first one starts at once, so that the first call does not wait for its imports."""

    def __init__(self) -> None:
        super().__init__()
        self.free.append(launch())

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        worker = self.reuse()
        if worker is not None and worker.draft not in (None, draft):
            worker.close()  # it was sent the model with another translation, or none
            worker = None
        worker = worker or launch()
        if worker.draft is None:
            make_ready(worker, draft, threads_beside(target))
        return self.lend(worker)


def launch() -> Worker:
    """Start a process that will be a worker. It imports what it needs; `make_ready` gives it its model."""
    mine, theirs = socket.socketpair()
    link = Link(mine)
    # Not multiprocessing: that would run the caller's script a second time, and leaves a helper process behind.
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
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

    return Worker(link, close, process)


def main(fileno: int) -> None:
    """What the process runs. It ends when its owner ends it, or when the wire closes because the owner is gone."""
    importlib.import_module("transformers.modeling_utils")  # most of what a model needs, before it is sent
    gc.freeze()  # to look for garbage among all that was imported takes a fifth of a second, in the midst of a draft
    serve(Link(socket.socket(fileno=fileno)))
    os._exit(0)


def make_ready(worker: Worker, draft: "PreTrainedModel | Translated", threads: int) -> None:
    """Send a launched process its model, and wait until it has it.

    Raises:
        RuntimeError: it could not start. It is closed then, as it is when the wait is interrupted.
    """
    try:
        worker.link.limit(START_PATIENCE)
        worker.link.send(Kind.MODEL, _packed(draft, threads))
        if not worker.link.connection.poll(QUIET):
            _log.warning("PEARL starts its draft worker in a process. This takes some seconds, once per drafter")
        answer = worker.link.receive()
        if answer is None or answer[0] is not Kind.READY:
            reason = "it did not answer" if answer is None else answer[1].decode(errors="replace")
            raise RuntimeError(f"the draft worker could not start: {reason}")
        worker.draft = draft
    except BaseException:
        worker.close()
        raise


def _packed(draft: "PreTrainedModel | Translated", threads: int) -> bytes:
    try:
        return encode((draft, threads))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise RuntimeError(f'draft_model cannot be sent to a process ({shown(error)}); use worker="thread"') from error


def threads_beside(target: torch.device) -> int:
    """How many threads a draft on the CPU computes with: one for each core that the target leaves, at least one.

    Where two models compute on the same cores, the threads of one wait for cores on which threads of the other wait.
    """
    mine = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return mine if target.type != "cpu" else min(mine, max(1, cores - mine))
