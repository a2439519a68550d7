"""Models that take other times than they do, and drafts that are right more often than they are.

- Pacing makes each forward occupy a pretended device for a set time, without using the CPU. Two paced models can run
  side by side in two threads, as they would on two devices; forwards of the same model queue up.
- Synthetic acceptance makes a draft right with a set probability, whatever it has learned. The draft model runs as
  ever, so it costs what it costs; then its logits are biased toward a known continuation of the prompt, or, by a seeded
  coin per position, away from it. Greedy decoding at batch 1 accepts that share of tokens.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.clock import Deadline
from hf_specdec.errors import SpeculationError, warn
from hf_specdec.tools.instruments.forwards import cached_tokens, input_shape, wrapped_forward

BIAS = 1000.0
"""of the logits under synthetic acceptance"""


@contextmanager
def paced(model: PreTrainedModel, milliseconds: float) -> Iterator[None]:
    """Each forward of `model` inside the block takes `milliseconds`, or longer where its own work does (one warning).

    Raises:
        SpeculationError: the time is not above 0.
    """
    if not milliseconds > 0:
        raise SpeculationError(f"a pace must be above 0 milliseconds, got {milliseconds}")
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


@contextmanager
def synthetic_acceptance(
    draft: PreTrainedModel, sequence: Sequence[int], acceptance: float, seed: int = 0
) -> Iterator[None]:
    """Inside the block, each greedy choice of the draft along `sequence` is right with probability `acceptance`.

    Args:
        sequence: the prompt and the target's own greedy continuation. Past its end, and in forwards of several rows,
            the draft is left as it is.
        acceptance: share of tokens to get right, in [0, 1].
        seed: of the coins; the same position always falls the same way, however often it is drafted.
    """
    if not 0 <= acceptance <= 1:
        raise SpeculationError(f"acceptance must be from 0 to 1, got {acceptance}")
    coins = torch.rand(len(sequence), generator=torch.Generator().manual_seed(seed)) < acceptance

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = cached_tokens(kwargs)  # read before the forward, which makes the cache longer
        rows, width = input_shape(args, kwargs)
        output = forward(*args, **kwargs)
        if rows > 1:
            return output
        logits = output.logits
        first = start + width - logits.shape[1]  # logits_to_keep drops the earlier ones
        for i in range(logits.shape[1]):
            if (position := first + i + 1) < len(sequence):
                right = sequence[position]
                # The token before the right one in the vocabulary is as wrong as any.
                logits[0, i, right if coins[position] else right - 1] += BIAS
        return output

    with wrapped_forward(draft, around):
        yield
