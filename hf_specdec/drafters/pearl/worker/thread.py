"""A draft model in a thread of the target's process, which ends with its call."""

import socket
import threading
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from ...draft_model.translating import model_of
from .serving import GRACE, serve
from .wire import Link
from .workers import Worker, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated


class Threads(Workers):
    """Worker threads. On a GPU all of them draft on one CUDA stream of their own."""

    stream: Any = None

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        device = input_device(model_of(draft))
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the weights may be on the way
        mine, theirs = socket.socketpair()
        link, arguments = Link(mine), (Link(theirs), draft, self.stream)
        thread = threading.Thread(target=serve, args=arguments, daemon=True, name="hf_specdec worker")
        thread.start()

        def close() -> None:
            link.close()
            thread.join(timeout=2 * GRACE)  # one that hangs in a kernel cannot be ended: it is left behind

        return Worker(link, close)
