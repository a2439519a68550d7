"""The CUDA stream of a draft model, so that it computes beside a target on the same card."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ....target.devices import input_device
from ...draft_model.translating import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated


def stream_for(draft: "PreTrainedModel | Translated", stream: Any = None) -> Any:
    """A stream for a draft model on a GPU, None on other devices. It waits for what the caller's stream has been asked
    for: the weights may be on the way.

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
