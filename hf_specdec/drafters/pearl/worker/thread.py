"""A draft model in a thread of the target's process, which ends with its call."""

import socket
import threading
from typing import TYPE_CHECKING, Any

import torch

from .serving import GRACE, serve
from .stream import stream_for
from .wire import Link
from .workers import Worker, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated


class Threads(Workers):
    """Worker threads. On a GPU all of them draft on one CUDA stream of their own."""

    stream: Any = None

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        self.stream = stream_for(draft, self.stream)
        mine, theirs = socket.socketpair()
        link, arguments = Link(mine), (Link(theirs), draft, self.stream)
        thread = threading.Thread(target=serve, args=arguments, daemon=True, name="hf_specdec worker")
        thread.start()

        def close() -> None:
            link.close()
            thread.join(timeout=2 * GRACE)  # one that hangs in a kernel cannot be ended: it is left behind

        return Worker(link, close)
