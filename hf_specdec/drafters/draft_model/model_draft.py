"""`ModelDraft`: a draft model that makes one step after another over its own cache, and says what they took."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...budget import DraftCost
from ...clock import now
from ...protocol import DraftContext, Sequences, Verdict
from ...target.devices import input_device
from ...transfer import to_device, waits
from .base import columns_for
from .over_cache import OverCache
from .translating import Translated, model_of, over_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Step(NamedTuple):
    """What a step gives."""

    tokens: Tensor
    """[B, k] candidates for the next place; the draft model goes on from the first"""
    logits: Tensor
    """[B, V] of the draft model"""
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
        self.blind = waits(input_device(model_of(model)))
        """whether to look at a step would be to wait for it"""
        self.steps = 0
        """of this round"""
        self._model = model
        self._over: OverCache | None = None
        self._columns = columns_for(context, model_of(model))
        self._rows = list(range(context.prompt_ids.shape[0]))
        self._began = self._first = self._ended = 0.0
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

    def begin(self, sequences: Sequences, steps: int) -> None:
        """Behind the accepted tokens of these rows, at most `steps` steps."""
        opened = self._over is None
        if self._over is None:
            began = now()
            self._over = model_over_cache(self.context, self._model)
            self.cost.observe_reading(now() - began, self.context.prompt_ids.numel())
        self._began = now()
        joined = self._over.follow(self._rows, sequences)
        self._usual = not (opened or joined or self._behind)
        self._rows, self.steps = list(sequences.rows), 0
        self._ids, self._lengths = with_room(sequences, steps), list(sequences.lengths)
        self._last: Tensor | None = None

    def step(self) -> Step:
        """One more place."""
        assert self._over is not None, "step() follows begin()"
        if self._last is None:
            logits = self._over.catch_up(self._ids, self._lengths)
        else:
            self._first = now() if self.steps == 1 else self._first
            write_tokens(self._ids, self._last, self._lengths)
            self._lengths = [n + 1 for n in self._lengths]
            logits = self._over.feed(self._ids, self._lengths, self._last)
        step = self._picked(logits)
        self._last, self.steps, self._ended = step.tokens[:, 0].clone(), self.steps + 1, now()
        return step

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
            self.cost.observe(self.steps, first - self._began, self._ended - self._began, self._usual)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        """Of the first candidates that each row [B] went on from, so many are part of the text now."""
        self._behind = self.steps == 0
        if self.steps and self._over is not None and verdict.rows == self._rows:
            self._over.accept(kept, verdict.stopped)
        self.steps = 0


def model_over_cache(context: DraftContext, model: "PreTrainedModel | Translated") -> OverCache:
    """A draft model that has read the call's prompt."""
    bounds = context.most_rows, context.most_tokens
    prompt = context.prompt_ids, context.prompt_mask
    return over_cache(model, *prompt, context.lockstep, *bounds, context.source, context.stats)


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
