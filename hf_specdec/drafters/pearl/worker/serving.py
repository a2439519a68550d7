"""`serve`: what a worker does until its wire is closed. It drafts in one thread and answers questions in another."""

import queue
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from .drafting import BackgroundDraft, CancelledError
from .wire import Kind, Link, Order, decode, encode_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRACE = 5.0
"""seconds for a draft step that has become useless to end"""

Orders = queue.SimpleQueue[tuple[Kind, bytes] | None]
"""for the drafting thread; None ends it"""


@dataclass
class Desk:
    """What the two threads of a worker share."""

    draft: BackgroundDraft | None = None
    """of the present call"""
    cancelled: int = -1
    """orders up to this epoch are useless"""
    in_call: bool = False
    error: str = ""
    """what went wrong"""

    def report(self, link: Link, error: Exception) -> None:
        """Tell the other side; nobody may be left to tell."""
        self.error = repr(error)
        with suppress(OSError):
            link.send(Kind.ERROR, self.error.encode())


def serve(link: Link, model: "PreTrainedModel | None" = None, stream: Any = None) -> Desk:
    """Read the wire until the other side hangs up. A second thread drafts, so that questions never wait for it.

    Args:
        model: None where it comes over the wire, with the number of threads to compute with.
        stream: CUDA stream to draft on; None makes one where the model is on a GPU.

    Returns:
        how things stood at the end.
    """
    desk, orders = Desk(), Orders()
    drafting: threading.Thread | None = None
    try:
        if model is not None:
            drafting = _begin(link, model, desk, orders, stream)
        while True:
            message = link.receive()
            assert message is not None
            kind, body = message
            if kind is Kind.MODEL:
                model, threads = decode(body)
                torch.set_num_threads(threads)
                drafting = _begin(link, model, desk, orders, stream)
                link.send(Kind.READY)
            elif kind is Kind.CANCEL:
                desk.cancelled = max(desk.cancelled, decode(body))
            elif kind is Kind.ASK:
                branch, column, tokens = decode(body)
                assert desk.draft is not None
                with torch.no_grad():
                    link.send(Kind.ANSWER, desk.draft.answer(branch, column, tokens))
            else:
                desk.in_call = kind is not Kind.CLOSE
                orders.put((kind, body))
    except OSError:
        pass  # the other side has hung up: there is nobody to tell
    except Exception as error:
        desk.report(link, error)
    finally:
        desk.cancelled = 2**62
        orders.put(None)
        if drafting is not None:
            drafting.join(GRACE)
        desk.draft = None  # which refers to the desk: the two would keep each other, and the draft's cache
        link.close()
    return desk


def _begin(link: Link, model: "PreTrainedModel", desk: Desk, orders: Orders, stream: Any) -> threading.Thread:
    """Start the drafting thread."""
    arguments = (link, model, desk, orders, stream)
    thread = threading.Thread(target=_draft, args=arguments, daemon=True, name="hf_specdec draft")
    thread.start()
    return thread


def _draft(link: Link, model: "PreTrainedModel", desk: Desk, orders: Orders, stream: Any) -> None:
    """The drafting thread. Gradient mode, autocast and CUDA streams are thread-local."""
    device = input_device(model)
    if stream is None and device.type == "cuda":
        stream = torch.cuda.Stream(device)
    try:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            while (item := orders.get()) is not None:
                kind, body = item
                if kind is Kind.OPEN:
                    setup = decode(body)
                    with setup.cast(device.type):
                        desk.draft = BackgroundDraft(setup, model, link, lambda epoch: desk.cancelled >= epoch)
                elif kind is Kind.CLOSE:
                    desk.draft = None
                elif desk.draft is not None:
                    order = Order(*decode(body))
                    try:
                        with setup.cast(device.type):
                            desk.draft.follow(order)
                    except CancelledError:
                        continue
                    link.send(Kind.DONE, encode_numbers(order.epoch))
    except OSError:
        pass
    except Exception as error:
        desk.report(link, error)
