"""A call with a drafter that is decoded plainly, because nothing can speed it up."""

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

from ..clock import now
from ..engine.guard import GuardedDrafter
from ..errors import warn
from ..schedule import AnyDrafter
from ..stats import SpeculationStats, text_length


def decoded_plainly(
    decode: Callable[[], Any], drafter: AnyDrafter, why: str, columns: int, ends: Container[int]
) -> Any:
    """The output of `decode`, transformers' own decoding of the call, with a warning and statistics that say why.

    Args:
        columns: of the prompt's ids.
        ends: tokens that end a text.
    """
    warn(f"falling back to plain decoding: {why}. The text is not affected, only the speed")
    began = now()
    output = decode()
    GuardedDrafter(drafter).report(_statistics(output, columns, ends, now() - began, why))
    return output


def _statistics(output: Any, columns: int, ends: Container[int], seconds: float, reason: str) -> SpeculationStats:
    """Also put on the output, if it is one that can carry them."""
    ids = output if isinstance(output, Tensor) else output.sequences
    steps = ids.shape[1] - columns
    stats = SpeculationStats(mode="plain", target_calls=steps, plain_steps=steps, total_seconds=seconds, notes=[reason])
    stats.emitted_tokens = sum(text_length(text, ends) for text in ids[:, columns:].tolist())
    stats.row_steps = stats.emitted_tokens
    if not isinstance(output, Tensor):
        output.speculation = stats
    return stats
