"""`serve`: what a worker does until its wire is closed. It drafts in one thread and answers questions in another."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from ...draft_model.translating import model_of
from .drafting import BackgroundDraft, CancelledError
from .stream import on_stream, stream_for
from .wire import Kind, Link, Order, decode, encode_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

GRACE = 5.0
"""seconds for a draft step that has become useless to end"""


class Serving:
    """The two threads of a worker, and what they share."""

    def __init__(self, link: Link, stream: Any) -> None:
        self.link, self.stream = link, stream
        self.orders = queue.SimpleQueue[tuple[Kind, bytes] | None]()
        """for the drafting thread; None ends it"""
        self.thread: threading.Thread | None = None
        self.draft: BackgroundDraft | None = None
        """of the present call"""
        self.cancelled = -1
        """orders up to this epoch are useless"""

    def begin(self, draft: "PreTrainedModel | Translated") -> None:
        """Start the drafting thread."""
        if self.stream is None:
            self.stream = stream_for(draft)
        self.thread = threading.Thread(target=self.work, args=(draft,), daemon=True, name="hf_specdec draft")
        self.thread.start()

    def read(self) -> None:
        """Read the wire until the other side hangs up."""
        while True:
            message = self.link.receive()
            assert message is not None
            kind, body = message
            if kind is Kind.MODEL:
                draft, threads = decode(body)
                torch.set_num_threads(threads)
                self.begin(draft)
                self.link.send(Kind.READY)
            elif kind is Kind.CANCEL:
                self.cancelled = max(self.cancelled, decode(body))
            elif kind is Kind.ASK:
                branch, column, tokens = decode(body)
                assert self.draft is not None
                with torch.no_grad(), on_stream(self.stream):  # behind the step that q is of, not behind the target
                    self.link.send(Kind.ANSWER, self.draft.answer(branch, column, tokens))
            else:
                self.orders.put((kind, body))

    def work(self, draft: "PreTrainedModel | Translated") -> None:
        """The drafting thread. Gradient mode, autocast and CUDA streams are thread-local."""
        device = input_device(model_of(draft))
        with self.reporting(), torch.no_grad(), on_stream(self.stream):
            while (item := self.orders.get()) is not None:
                kind, body = item
                if kind is Kind.OPEN:
                    setup = decode(body)
                    with setup.cast(device.type):
                        self.draft = BackgroundDraft(setup, draft, self.link, lambda epoch: self.cancelled >= epoch)
                elif kind is Kind.CLOSE:
                    self.draft = None
                elif self.draft is not None:
                    order = Order(*decode(body))
                    with suppress(CancelledError), setup.cast(device.type):
                        self.draft.follow(order)
                        self.link.send(Kind.DONE, encode_numbers(order.epoch))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other side of errors, unless it has hung up."""
        with suppress(OSError):
            try:
                yield
            except OSError:
                raise
            except Exception as error:
                self.link.send(Kind.ERROR, repr(error).encode())

    def end(self) -> None:
        self.cancelled = 2**62
        self.orders.put(None)
        if self.thread is not None:
            self.thread.join(GRACE)
        self.draft = None  # which refers to this object: the two would keep each other, and the draft's cache
        self.link.close()


def serve(link: Link, draft: "PreTrainedModel | Translated | None" = None, stream: Any = None) -> None:
    """Serve until the other side hangs up. A second thread drafts, so that questions never wait for it.

    Args:
        draft: what to draft with; None where it comes over the wire, with the number of threads to compute with.
        stream: CUDA stream to draft on; None makes one where the model is on a GPU.
    """
    serving = Serving(link, stream)
    try:
        with serving.reporting():
            if draft is not None:
                serving.begin(draft)
            serving.read()
    finally:
        serving.end()
