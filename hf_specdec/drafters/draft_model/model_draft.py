"""`ModelDraft`: a draft model that makes one step after another over its own cache, and says what they took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...budget import DraftCost
from ...clock import Moment, mark, now
from ...protocol import DraftContext, Sequences, Verdict
from ...target.buffers import WIDEST
from ...target.capturable import wants_captured
from ...target.devices import input_device
from ...target.recorded import first_runs
from ...transfer import to_device, waits
from ...verify.picking import DraftPicker
from ..drawn import with_room, write_tokens
from ..steps import Several, Step, Steps, Took
from .base import columns_for
from .over_cache import DraftCall, OverCache, Picking
from .translating import Translated, model_of, over_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Estimate(Protocol):
    """What speaks for a token that was drafted, from 0 to 1."""

    def begin(self, sequences: Sequences) -> None:
        """A round begins, behind these rows."""

    def of(self, logits: Tensor, tokens: Tensor) -> list[float]:
        """[B] of a round's next tokens [B], from the draft's logits [B, V] there."""


@dataclass
class Early:
    """Steps that were asked for before the host knew behind what."""

    rows: list[int]
    lengths: list[int]
    """[B] of the texts behind which they were made, once that is known"""
    steps: Several
    took: Took


@dataclass
class DraftChain:
    """A round's steps, and what they are made behind."""

    rows: list[int]
    ids: Tensor
    """[B, columns] with room for the draft"""
    lengths: list[int]
    """[B] columns that count, those drafted included"""
    planned: int
    """steps that will be made, whatever they give"""
    began: Moment
    recorded: int
    """`first_runs` before"""
    usual: bool
    """whether no more was read than the round before had added"""
    last: Tensor | None = None
    """[B] what was drafted last"""
    ahead: Several | None = None
    """steps that were made, and not asked for yet, if there are any"""
    early: bool = False
    """whether it has begun with steps that were"""
    first: Moment | None = None
    """when the first step was there, if it was made alone"""
    ended: Moment | None = None
    """when the last one was"""


class ModelDraft(Steps):
    """One forward of the draft model per step. Its cache is made, and the prompt read, when it is asked first."""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        cost: DraftCost,
        candidates: int | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """
        Args:
            cost: told what steps take.
            candidates: k, the likeliest tokens, with their chances; None for one token as the call's sampling picks it.
            estimate: of first candidates, in place of the chance that the draft gives them.
        """
        self.context, self.cost, self.candidates, self.estimate = context, cost, candidates, estimate
        self.blind = is_blind(context, model)
        self._model, self._device = model, input_device(model_of(model))
        self._over: OverCache | None = None
        self._columns = columns_for(context, model_of(model))
        self._round: DraftChain | None = None
        """the present one, or the last"""
        self._took: Took | None = None
        self._early: Early | None = None
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

    @property
    def _rows(self) -> list[int]:
        """Of its cache."""
        return list(range(self.context.prompt_ids.shape[0])) if self._round is None else self._round.rows

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        opened = self._over is None
        if self._over is None:
            reading = now()
            self._over = over_cache(self._model, DraftCall.of(self.context))
            self.cost.observe_reading(now() - reading, self.context.prompt_ids.numel())
        began, recorded = mark(self._device), first_runs()
        joined = self._over.follow(self._rows, sequences)
        if self.estimate is not None:
            self.estimate.begin(sequences)
            planned = 0  # recorded steps show no logits
        rows, lengths, usual = list(sequences.rows), list(sequences.lengths), not (opened or joined or self._behind)
        self._round = DraftChain(rows, with_room(sequences, steps), lengths, planned, began, recorded, usual)
        self.steps = 0
        early, self._early = self._early, None
        if early is not None and (early.rows, early.lengths) == (rows, lengths):
            self._over.learns(list(lengths), early.steps.tokens.shape[1])
            self._round.ahead, self._round.early, self._took = early.steps, True, early.took

    def several(self, count: int) -> Several:
        parts, until = list[Several](), self.steps + count
        while self.steps < until:
            parts.append(self._recorded(until - self.steps) or Several.of([self.step()]))
        return Several.joined(parts)

    def step(self) -> Step:
        if (several := self._recorded(1)) is not None:
            return several.only
        over, here = self._over, self._round
        assert over is not None and here is not None, "step() follows begin()"
        if here.last is None:
            step = self._picked(here, over.catch_up(here.ids, here.lengths))
        else:
            write_tokens(here.ids, here.last, here.lengths)
            here.lengths = [n + 1 for n in here.lengths]
            step = self._picked(here, over.feed(here.ids, here.lengths, here.last))
        self._made(here, step.tokens[:, 0], 1)
        if self.steps == 1:
            here.first = here.ended
        return step

    def _made(self, here: DraftChain, last: Tensor, count: int) -> None:
        """So many steps, the last of which gave these tokens [B]."""
        here.last, self.steps, here.ended = last, self.steps + count, mark(self._device)

    def _recorded(self, most: int) -> Several | None:
        """The next steps, at most so many, where they were recorded as one; None where there are none."""
        over, here = self._over, self._round
        assert over is not None and here is not None, "steps follow begin()"
        begun = here.last is not None
        if here.ahead is None and here.planned - self.steps > begun and self.chains:
            self._chain_on(over, here)
        if here.ahead is None:
            return None
        several, left = here.ahead.part(0, most), here.ahead.tokens.shape[1] - most
        here.ahead, made = here.ahead.part(most, left) if left > 0 else None, several.tokens.shape[1]
        here.lengths = [n + made - (not begun) for n in here.lengths]
        self._made(here, several.tokens[:, -1, 0], made)
        return several

    def _chain_on(self, over: OverCache, here: DraftChain) -> None:
        """All steps that are planned as one: behind the drafted token, or behind what the text has more than the cache,
        if that is little."""
        first = over.missing(here.ids, here.lengths) if here.last is None else here.last[:, None]
        if first is None:
            return
        count, behind = min(here.planned - self.steps, WIDEST), here.lengths
        if here.last is not None:
            behind = [n + 1 for n in behind]
        here.ahead = self._chained(first, count, self._numbers(here.rows, behind, count))
        if here.last is None:
            over.learns(here.lengths, count)

    @property
    def chains(self) -> bool:
        """Whether several steps can be recorded as one."""
        pick, over = self.context.pick, self._over
        if over is None or not over.chains or not isinstance(pick, DraftPicker):
            return False
        return pick.recordable is not None and over.device == self.context.device

    def _chained(self, first: Tensor, count: int, numbers: Tensor | None, lengths: Tensor | None = None) -> Several:
        """So many steps behind the tokens first [B, F] as one that is recorded; arguments as of `OverCache.chain`."""
        pick, k = self.context.pick, self.candidates
        assert self._over is not None and isinstance(pick, DraftPicker)
        chain = Picking(lambda logits, u: pick.from_logits(logits, u, k), numbers, (pick.recordable, k))
        tokens, *more = self._over.chain(first, count, chain, lengths)
        if k is not None:
            return Several(tokens, *more)
        return Several(tokens[:, :, None], q=more[0] if more else None)

    def _numbers(self, rows: list[int], lengths: Sequence[int], count: int, ahead: int = 0) -> Tensor | None:
        """The random numbers [B, count] of draws behind `lengths` columns and the next ones; None where none are drawn.

        Args:
            ahead: rounds until those draws are verified.
        """
        pick = self.context.pick
        if not self.context.do_sample or not isinstance(pick, DraftPicker):
            return None
        behind = [[n + i for n in lengths] for i in range(count)]
        return torch.stack([pick.numbers(at, rows, self._device, ahead) for at in behind], 1)

    def _picked(self, here: DraftChain, logits: Tensor) -> Step:
        pick, behind = self.context.pick, (here.ids, here.lengths, here.rows, logits)
        if self.candidates is None:
            tokens, q = pick(*behind)
            step = Step(tokens[:, None], q=q)
        else:
            step = Step(*pick.likeliest(*behind, self.candidates))
        return step if self.estimate is None else step._replace(said=self.estimate.of(logits, step.tokens[:, 0]))

    # ------------------------------------------------------------------ before it is known what was accepted

    @property
    def drafts_early(self) -> bool:
        """Whether `draft_early` may be called: one token is picked for each place, by recorded steps."""
        pick, captured = self.context.pick, wants_captured(self.context.forwards, model_of(self._model))
        return captured and self.candidates is None and isinstance(pick, DraftPicker) and pick.recordable is not None

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        """As many steps as this round has made, behind texts that end with `last` [B, 2], of which the host does not
        know yet how many tokens n [B] are accepted. The next round takes them if it is about the same rows.

        The last but one is fed again: where all drafted tokens are accepted the cache does not hold it yet.
        """
        here = self._round
        if here is None or not (self.steps and self.chains):
            return
        count, columns = min(self.steps, WIDEST), min(self._columns, self.context.max_length)
        if max(here.lengths) + 1 + count > columns:  # if all is accepted there is no room
            return
        start = [length - self.steps + 1 for length in here.lengths]
        numbers = self._numbers(here.rows, [length + 1 for length in start], self.steps + count, ahead=1)
        if numbers is not None:
            numbers = numbers.gather(1, n[:, None] + torch.arange(count, device=n.device))
        ends = n + to_device([length - 1 for length in start], n.device)
        began, recorded = mark(self._device), first_runs()
        steps = self._chained(last, count, numbers, ends)
        took = Took(count, began, None, mark(self._device), first_runs() > recorded)
        self._early = Early(list(here.rows), start, steps, took)

    # ------------------------------------------------------------------ the end of a round

    def end(self) -> None:
        here = self._round
        if self.steps and here is not None and here.ended is not None and not here.early:
            self._took = Took(self.steps, here.began, here.first, here.ended, first_runs() > here.recorded)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        whole = zip(verdict.tokens, verdict.accepted, verdict.stopped, strict=True)
        if not self.steps or any(len(text) != n + 1 for text, n, stopped in whole if not stopped):
            self._early = None  # it is behind more than the engine took: others disagreed, or a row got too far ahead
        if self._early is not None:
            self._early.lengths = [n + len(text) for n, text in zip(self._early.lengths, verdict.tokens, strict=True)]
        if self._took is not None and self._round is not None:
            self._took.tell(self.cost, self._round.usual)
            self._took = None
        self._behind = self.steps == 0
        if self.steps and self._over is not None and verdict.rows == self._rows:
            self._over.accept(kept, verdict.stopped)
        self.steps = 0


def is_blind(context: DraftContext, model: "PreTrainedModel | Translated") -> bool:
    """Whether steps are made without a look at them: to look would be to wait for the device, or steps are recorded
    together."""
    device = input_device(model_of(model))
    return waits(device) or wants_captured(context.forwards, model_of(model))
