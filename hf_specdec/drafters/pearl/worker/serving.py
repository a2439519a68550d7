"""`serve`: what a worker does until its wire is closed."""

import gc
import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from ...draft_model.translating import model_of
from .drafting import BackgroundDraft
from .wire import Link

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated


@contextmanager
def reporting(link: Link) -> Iterator[None]:
    """Tell the other side of errors, unless it has hung up, and wait until it does: it would not hear them else."""
    with suppress(OSError, EOFError):
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            link.send("error", repr(error))
            while True:
                link.connection.recv_bytes()


def serve(link: Link, model: "PreTrainedModel | Translated", stream: Any = None) -> None:
    """Draft until the other side hangs up. Whatever it says makes useless what it has ordered before.

    Args:
        stream: CUDA stream to draft on; None for the present one.
    """
    # Gradient mode, autocast and CUDA streams are thread-local.
    device = input_device(model_of(model))
    on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
    draft: BackgroundDraft | None = None
    with closing(link), reporting(link), torch.no_grad(), on_stream:
        while True:
            match link.receive():
                case ("open", setup):
                    with setup.cast(device.type):
                        draft = BackgroundDraft(setup, model)
                case ("draft", number, order) if draft is not None:
                    with setup.cast(device.type):
                        for index in range(draft.follow(order)):
                            if link.connection.poll():
                                break
                            link.send("step", number, *draft.step(index))
                    link.send("done", number)
                case ("close",):
                    draft = None


def end_with_owner() -> None:
    """Even in the midst of a draft step: the owner holds the other end of the input, and says nothing."""
    sys.stdin.buffer.read()
    os._exit(0)


def main(fileno: int) -> None:
    """What a worker's process runs."""
    threading.Thread(target=end_with_owner, daemon=True).start()
    importlib.import_module("transformers.modeling_utils")  # most of what a model needs, before it is sent
    gc.freeze()  # to look for garbage among all that was imported takes a fifth of a second, in the midst of a draft
    link = Link(socket.socket(fileno=fileno))
    with reporting(link):
        _, model, threads = link.receive()
        torch.set_num_threads(threads)
        stream = stream_for(model)
        link.send("ready")
        serve(link, model, stream)
    os._exit(0)


def stream_for(draft: "PreTrainedModel | Translated", stream: Any = None) -> Any:
    """A CUDA stream for a draft model on a GPU, None on other devices. It waits for what the caller's stream has been
    asked for: the weights may be on the way.

    Args:
        stream: one that was made before, which is used again; None for a new one.
    """
    device = input_device(model_of(draft))
    if device.type != "cuda":
        return None
    stream = stream or torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
