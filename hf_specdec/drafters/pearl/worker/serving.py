"""`serve`: what a worker does until its wire is closed. It drafts in one thread and answers questions in another."""

import gc
import importlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from ...draft_model.translating import model_of
from .drafting import BackgroundDraft
from .wire import Link

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

GRACE = 5.0
"""seconds for a draft step that has become useless to end"""


class Serving:
    """The two threads of a worker, and what they share."""

    def __init__(self, link: Link, stream: Any) -> None:
        self.link, self.stream = link, stream
        self.messages = queue.SimpleQueue[Any]()
        """for the drafting thread; None ends it"""
        self.latest: Any = None
        """of these: an older order is useless"""
        self.thread: threading.Thread | None = None
        self.draft: BackgroundDraft | None = None
        """of the present call"""

    def begin(self, model: "PreTrainedModel | Translated") -> None:
        """Start the drafting thread."""
        if self.stream is None:
            self.stream = stream_for(model)
        self.thread = threading.Thread(target=self.work, args=(model,), daemon=True, name="hf_specdec draft")
        self.thread.start()

    def read(self) -> None:
        """Read the wire until the other side hangs up."""
        while True:
            match self.link.receive():
                case ("model", model, threads):
                    torch.set_num_threads(threads)
                    self.begin(model)
                    self.link.send("ready")
                case ("ask", *place):
                    assert self.draft is not None
                    with torch.no_grad(), on_stream(self.stream):  # behind the step that q is of, not behind the target
                        self.link.send("answer", self.draft.answer(*place))
                case message:
                    self.tell(message)

    def tell(self, message: Any) -> None:
        """Something for the drafting thread, which makes useless what it was told before."""
        self.latest = message
        self.messages.put(message)

    def work(self, model: "PreTrainedModel | Translated") -> None:
        """The drafting thread. Gradient mode, autocast and CUDA streams are thread-local."""
        device = input_device(model_of(model))
        with self.reporting(), torch.no_grad(), on_stream(self.stream):
            while message := self.messages.get():
                match message:
                    case ("open", setup):
                        with setup.cast(device.type):
                            self.draft = BackgroundDraft(setup, model)
                    case ("draft", number, order) if self.draft is not None:
                        with setup.cast(device.type):
                            for index in range(self.draft.follow(order)):
                                if self.latest is not message:
                                    break
                                self.link.send("step", number, *self.draft.step(index))
                        self.link.send("done", number)
                    case ("close",):
                        self.draft = None

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other side of errors, unless it has hung up."""
        with suppress(OSError):
            try:
                yield
            except OSError:
                raise
            except Exception as error:
                self.link.send("error", repr(error))

    def end(self) -> None:
        self.tell(None)
        if self.thread is not None:
            self.thread.join(GRACE)
        self.link.close()


def serve(link: Link, model: "PreTrainedModel | Translated | None" = None, stream: Any = None) -> None:
    """Serve until the other side hangs up. A second thread drafts, so that questions never wait for it.

    Args:
        model: what to draft with; None where it comes over the wire, with the number of threads to compute with.
        stream: CUDA stream to draft on; None makes one where the model is on a GPU.
    """
    serving = Serving(link, stream)
    try:
        with serving.reporting():
            if model is not None:
                serving.begin(model)
            serving.read()
    finally:
        serving.end()


def main(fileno: int) -> None:
    """What a worker's process runs. It ends when its owner ends it, or when the wire closes because the owner is
    gone."""
    importlib.import_module("transformers.modeling_utils")  # most of what a model needs, before it is sent
    gc.freeze()  # to look for garbage among all that was imported takes a fifth of a second, in the midst of a draft
    serve(Link(socket.socket(fileno=fileno)))
    os._exit(0)


# ---------------------------------------------------------------------- beside a target on the same card


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


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Within the block, this thread computes on the stream; where there is none, as it did."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
