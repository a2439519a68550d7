"""The forwards of a generation: one record per call of the target or the draft, taken from outside the decoding loop.

The same meter reads transformers' loop and ours, so their times are split in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedModel

from ...clock import now
from ...target.devices import input_device
from ...target.recorded import Replayed
from .forwards import cached_tokens, input_shape, wrapped_forward

T = TypeVar("T")
Role = Literal["target", "draft"]


@dataclass(slots=True)
class Forward:
    """One forward of a model."""

    role: Role
    rows: int
    width: int
    """tokens per row"""
    context: int
    """tokens per row in the cache before it; 0 is a prefill"""
    start: float
    """seconds since the generation began"""
    seconds: float = 0.0


@dataclass
class Meter:
    """The forwards of one generation, and how long it took."""

    began: float = 0.0
    """by `clock.now`"""
    forwards: list[Forward] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, role: Role) -> list[Forward]:
        return [forward for forward in self.forwards if forward.role == role]

    def total(self, role: Role, prefill: bool = False) -> float:
        """Seconds spent in prefills, or else in the other forwards, of one model."""
        return sum(f.seconds for f in self.of(role) if (f.context == 0) == prefill)

    @property
    def prefill_seconds(self) -> float:
        return self.total("target", prefill=True) + self.total("draft", prefill=True)

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    def accepted_per_round(self, prompt: int, tokens: int) -> list[tuple[int, int]]:
        """(drafted, accepted) of each verification at batch 1, read off how far the target's cache moved.

        Args:
            prompt: tokens of the prompt.
            tokens: new tokens of the whole generation.
        """
        calls = self.of("target")
        ends = [call.context for call in calls[1:]] + [prompt + tokens - 1]
        rounds = []
        for call, end in zip(calls, ends, strict=True):
            known = prompt - call.context if call.context < prompt else 1  # tokens in the forward that are no draft
            drafted = call.width - known
            rounds.append((drafted, min(max(end - call.context - known, 0), drafted)))
        return rounds


@contextmanager
def metered(target: PreTrainedModel, draft: PreTrainedModel | None = None) -> Iterator[Meter]:
    """Record the forwards inside the block. On a GPU, forwards are timed by events and stay asynchronous."""
    meter = Meter()
    cuda = input_device(target).type == "cuda"
    events: list[tuple[list[Forward], torch.cuda.Event, torch.cuda.Event]] = []
    quiet: set[Role] = set()

    def timed(records: list[Forward], run: Callable[[], T]) -> T:
        """What a run gives, its time shared among so many records."""
        meter.forwards += records
        if not cuda:
            began = now()
            result = run()
            seconds = (now() - began) / len(records)
            for i, record in enumerate(records):
                record.start, record.seconds = began - meter.began + i * seconds, seconds
            return result
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = run()
        last.record()
        events.append((records, first, last))
        return result

    def recorder(role: Role) -> Callable[..., Any]:
        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if role in quiet:  # a part of what is replayed
                return forward(*args, **kwargs)
            record = Forward(role, *input_shape(args, kwargs), cached_tokens(kwargs), now() - meter.began)
            return timed([record], lambda: forward(*args, **kwargs))

        return around

    def replays(role: Role) -> Replayed:
        def replayed(run: Callable[[], T], rows: int, width: int, held: int, times: int) -> T:
            began = now() - meter.began
            quiet.add(role)
            try:
                return timed([Forward(role, rows, width, held + i * width, began) for i in range(times)], run)
            finally:
                quiet.discard(role)

        return replayed

    with ExitStack() as stack:
        stack.enter_context(wrapped_forward(target, recorder("target"), replays("target")))
        if draft is not None:
            stack.enter_context(wrapped_forward(draft, recorder("draft"), replays("draft")))
        if cuda:
            torch.cuda.synchronize()
        meter.began = now()
        yield meter
        made = list(events)  # a draft that is still at work in another thread is not waited for
        if cuda:
            torch.cuda.synchronize()
        meter.seconds = now() - meter.began
    for records, first, last in made:
        for record in records:
            record.seconds = first.elapsed_time(last) / 1000 / len(records)
