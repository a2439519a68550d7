"""`on_lasting_thread`: steps are recorded one after the other, on a thread of their own that lasts.

Recordings keep addresses, and what a thread's cuBLAS was given may go with the thread.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import copy_context
from typing import TypeVar

import torch

T = TypeVar("T")


def _made() -> None:
    """A forked process has none of its parent's threads."""
    global _thread
    _thread = ThreadPoolExecutor(1, "hf_specdec recordings")


_thread: ThreadPoolExecutor
_made()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_made)


def on_lasting_thread(action: Callable[[], T]) -> T:
    """What an action gives, or raises, in the modes of the thread that asks; that thread waits."""
    grad, inference, device = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
    placed = nullcontext() if device.type == "cpu" else device  # the thread's own; within a block pieces compile anew

    def carried() -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), placed:
            return action()

    running = _thread.submit(copy_context().run, carried)
    try:
        return running.result()
    finally:  # also where the wait is interrupted: the tensors are not free before
        wait([running])
        del running  # which has what was raised, whose traceback has this frame
