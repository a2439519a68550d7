"""`ModelDraft`: a draft model that makes one step after another over its own cache, and says what they took."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...budget import DraftCost
from ...clock import Moment, mark, now
from ...protocol import DraftContext, Sequences, Verdict
from ...target.buffers import WIDEST
from ...target.devices import input_device
from ...transfer import to_device, waits
from ...verify.picking import DraftPicker
from .base import columns_for
from .over_cache import Chain, OverCache
from .translating import Translated, model_of, over_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Step(NamedTuple):
    """What a step gives."""

    tokens: Tensor
    """[B, k] candidates for the next place; the draft model goes on from the first"""
    logits: Tensor | None
    """[B, V] of the draft model; None of a step that was recorded with others"""
    chances: Tensor | None = None
    """[B, k] that it gives to the candidates, where several were asked for"""
    q: Tensor | None = None
    """[B, V] that the one candidate was drawn from; None where it is the likeliest one"""


class ModelDraft:
    """One forward of the draft model per step. Its cache is made, and the prompt read, when it is asked first."""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        cost: DraftCost,
        candidates: int | None = None,
    ) -> None:
        """
        Args:
            cost: told what steps take.
            candidates: k, the likeliest tokens, with their chances; None for one token as the call's sampling picks it.
        """
        self.context, self.cost, self.candidates = context, cost, candidates
        self.blind = is_blind(context, model)
        self.steps = 0
        """of this round"""
        self._model = model
        self._over: OverCache | None = None
        self._columns = columns_for(context, model_of(model))
        self._rows = list(range(context.prompt_ids.shape[0]))
        self._device = input_device(model_of(model))
        self._began = self._first = self._ended = Moment(0.0)
        self._times: tuple[int, Moment, Moment, Moment] | None = None
        self._behind = True
        """whether the last round left it behind the text"""

    def room(self, sequences: Sequences) -> int:
        """Columns that it can draft in."""
        limit = self._columns if self._over is None else min(self._columns, self._over.context_limit)
        return limit - max(sequences.lengths)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that it has not read; 0 once it was asked."""
        return 0 if self._over is not None else self.context.prompt_ids.numel()

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        """Behind the accepted tokens of these rows, at most `steps` steps.

        Args:
            planned: how many will be made, whatever they give, without a look at their logits.
        """
        opened = self._over is None
        if self._over is None:
            began = now()
            self._over = model_over_cache(self.context, self._model)
            self.cost.observe_reading(now() - began, self.context.prompt_ids.numel())
        self._began = mark(self._device)
        joined = self._over.follow(self._rows, sequences)
        self._usual = not (opened or joined or self._behind)
        self._rows, self.steps = list(sequences.rows), 0
        self._ids, self._lengths = with_room(sequences, steps), list(sequences.lengths)
        self._last: Tensor | None = None
        self._planned, self._ahead = planned, deque[Step]()

    def step(self) -> Step:
        """One more place."""
        assert self._over is not None, "step() follows begin()"
        if self._last is None:
            logits = self._over.catch_up(self._ids, self._lengths)
            step = self._picked(logits)
        else:
            self._first = mark(self._device) if self.steps == 1 else self._first
            before, self._lengths = self._lengths, [n + 1 for n in self._lengths]
            if not self._ahead and self._planned - self.steps > 1:
                self._ahead.extend(self._chained(min(self._planned - self.steps, WIDEST)))
            if self._ahead:
                step = self._ahead.popleft()
            else:
                self._planned = 0  # what cannot be recorded now cannot be later in the round
                write_tokens(self._ids, self._last, before)
                step = self._picked(self._over.feed(self._ids, self._lengths, self._last))
        self._last, self.steps, self._ended = step.tokens[:, 0].clone(), self.steps + 1, mark(self._device)
        return step

    def _chained(self, count: int) -> list[Step]:
        """So many more steps as one that is recorded; none where that cannot be."""
        assert self._over is not None and self._last is not None
        pick, device, k = self.context.pick, self._over.device, self.candidates
        settings = pick.recordable if isinstance(pick, DraftPicker) and device == self.context.device else None
        if not isinstance(pick, DraftPicker) or settings is None:
            return []
        numbers = None
        if self.context.do_sample:
            behind = [[n + i for n in self._lengths] for i in range(count)]
            numbers = torch.stack([pick.numbers(lengths, self._rows, device) for lengths in behind], 1)
        chain = Chain(lambda logits, u: pick.from_logits(logits, u, k), numbers, (settings, k))
        found = self._over.chain(self._last, count, chain)
        if found is None:
            return []
        tokens, *more = (several.unbind(1) for several in found)
        if k is not None:
            return [Step(ids, None, chances) for ids, chances in zip(tokens, *more, strict=True)]
        return [
            Step(ids[:, None], None, q=q) for ids, q in zip(tokens, more[0] if more else [None] * count, strict=True)
        ]

    def _picked(self, logits: Tensor) -> Step:
        pick = self.context.pick
        if self.candidates is None:
            tokens, q = pick(self._ids, self._lengths, self._rows, logits)
            return Step(tokens[:, None], logits, q=q)
        tokens, chances = pick.likeliest(self._ids, self._lengths, self._rows, logits, self.candidates)
        return Step(tokens, logits, chances)

    def end(self) -> None:
        """No further step is made in this round."""
        if self.steps:
            first = self._first if self.steps > 1 else self._ended
            self._times = self.steps, self._began, first, self._ended

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        """Of the first candidates that each row [B] went on from, so many are part of the text now. The device has
        done all that it was asked for."""
        if self._times is not None:
            steps, began, first, ended = self._times
            self.cost.observe(steps, first.since(began), ended.since(began), self._usual)
            self._times = None
        self._behind = self.steps == 0
        if self.steps and self._over is not None and verdict.rows == self._rows:
            self._over.accept(kept, verdict.stopped)
        self.steps = 0


def is_blind(context: DraftContext, model: "PreTrainedModel | Translated") -> bool:
    """Whether steps are made without a look at them: to look would be to wait for the device, or steps are recorded
    together."""
    device = input_device(model_of(model))
    return waits(device) or context.forwards in ("captured", "bitwise")


def model_over_cache(context: DraftContext, model: "PreTrainedModel | Translated") -> OverCache:
    """A draft model that has read the call's prompt."""
    bounds = context.most_rows, context.most_tokens
    prompt, how = (context.prompt_ids, context.prompt_mask), (context.forwards, context.max_length)
    return over_cache(model, *prompt, context.lockstep, *bounds, context.source, context.stats, *how)


def write_tokens(ids: Tensor, tokens: Tensor, columns: list[int]) -> None:
    """Put one token [B] into each row of ids [B, capacity]."""
    if len(set(columns)) == 1:
        ids[:, columns[0]] = tokens
    else:
        ids.scatter_(1, to_device(columns, ids.device)[:, None], tokens[:, None])


def with_room(sequences: Sequences, width: int) -> Tensor:
    """The sequences' ids with columns to write the draft to."""
    missing = max(sequences.lengths) + width - sequences.ids.shape[1]
    return sequences.ids if missing <= 0 else torch.nn.functional.pad(sequences.ids, (0, missing))
