"""The worker: drafts in a thread of its own and answers questions meanwhile.

It runs in a thread of the target's process (`serve`) or in a process of its own (`main`); the line is the same.
"""

import gc
import importlib
import os
import queue
import socket
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...target.devices import input_device
from ..draft_model.translating import Translated, model_of
from .background import BackgroundDraft, CancelledError
from .link import Kind, Link, Order, decode_numbers, decode_object, encode_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRACE = 5.0
"""seconds for a draft step that has become useless to end"""


@dataclass
class Desk:
    """What the two threads of a worker share."""

    session: BackgroundDraft | None = None
    cancelled: int = -1
    """orders up to this epoch are useless"""


def serve(link: Link, draft: "PreTrainedModel | Translated | None" = None, stream: Any = None) -> None:
    """Read the line until the other side hangs up; a second thread drafts, so that questions never wait for it.

    Args:
        draft: what to draft with; None where it comes over the line, with the number of threads to compute with.
        stream: to draft on; None makes one, on a GPU.
    """
    desk, orders = Desk(), queue.SimpleQueue[Any]()
    drafting: threading.Thread | None = None

    def begin(draft: "PreTrainedModel | Translated") -> threading.Thread:
        thread = threading.Thread(
            target=_draft, args=(link, draft, desk, orders, stream), daemon=True, name="hf_specdec draft"
        )
        thread.start()
        return thread

    try:
        drafting = begin(draft) if draft is not None else None
        while True:
            message = link.receive()
            assert message is not None
            kind, body = message
            if kind is Kind.MODEL:
                draft, threads = decode_object(body)
                torch.set_num_threads(threads)
                drafting = begin(draft)
                link.send(Kind.READY)
            elif kind is Kind.CANCEL:
                desk.cancelled = max(desk.cancelled, *decode_numbers(body))
            elif kind is Kind.ASK:
                line, column, *tokens = decode_numbers(body)
                assert desk.session is not None
                with torch.no_grad():
                    link.send(Kind.ANSWER, desk.session.answer(line, column, tokens))
            else:
                orders.put((kind, body))
    except OSError:
        pass  # the other side has hung up: there is nobody to tell
    except Exception as error:
        _tell(link, error)
    finally:
        desk.cancelled = 2**62
        orders.put(None)
        if drafting is not None:
            drafting.join(GRACE)
        desk.session = None  # which knows the desk: the two would keep each other, and the draft's cache
        link.close()


def _draft(
    link: Link, draft: "PreTrainedModel | Translated", desk: Desk, orders: "queue.SimpleQueue[Any]", stream: Any
) -> None:
    """The drafting thread. Gradient mode, autocast and CUDA streams are thread-local."""
    device = input_device(model_of(draft))
    if stream is None and device.type == "cuda":
        stream = torch.cuda.Stream(device)
    try:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            while (item := orders.get()) is not None:
                kind, body = item
                if kind is Kind.OPEN:
                    setup = decode_object(body)
                    with setup.cast(device.type):
                        desk.session = BackgroundDraft(setup, draft, link, desk)
                elif kind is Kind.CLOSE:
                    desk.session = None
                elif desk.session is not None:
                    order = Order.decode(body)
                    try:
                        with setup.cast(device.type):
                            desk.session.follow(order)
                    except CancelledError:
                        continue
                    link.send(Kind.DONE, encode_numbers(order.epoch, desk.session.sent))
    except OSError:
        pass
    except Exception as error:
        _tell(link, error)


def _tell(link: Link, error: Exception) -> None:
    with suppress(OSError):  # nobody may be left to tell
        link.send(Kind.ERROR, repr(error).encode())


def main(fileno: int) -> None:
    """A process of its own: ended by its owner, or by the end of the line when the owner dies."""
    importlib.import_module("transformers.modeling_utils")  # most of what a model needs, before it is sent
    gc.freeze()  # to look for garbage among all that was imported takes a fifth of a second, in the midst of a draft
    serve(Link(socket.socket(fileno=fileno)))
    os._exit(0)
