"""Paced models: each forward occupies a pretended device for a set time, without using the CPU for it.

A machine without a large model's device can thus measure what a schedule does with its times: two paced models run side
by side in two threads, as they would on two devices, while forwards of the same model queue up.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ...clock import Deadline
from ...errors import SpeculationError, warn
from .forwards import wrapped_forward


@contextmanager
def paced(model: PreTrainedModel, milliseconds: float) -> Iterator[None]:
    """Each forward of `model` inside the block takes `milliseconds`, or longer where its own work does (one warning).

    Raises:
        SpeculationError: the time is not above 0.
    """
    if not milliseconds > 0:
        raise SpeculationError(f"pace_target and pace_draft must be above 0 milliseconds, got {milliseconds}")
    device, overrun = threading.Lock(), threading.Event()

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with device:
            pace = Deadline(milliseconds / 1000)
            output = forward(*args, **kwargs)
            if pace.over and not overrun.is_set():
                overrun.set()
                warn(
                    f"a forward of {type(model).__name__} takes longer than its pace of {milliseconds} ms, so the "
                    "measured times are too long; raise the pace"
                )
            pace.sleep()
            return output

    with wrapped_forward(model, around):
        yield
