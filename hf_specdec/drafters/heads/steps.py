"""`HeadSteps`: heads as steps of a session, whatever their kind."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...budget import DraftCost
from ...clock import mark
from ...errors import warn
from ...protocol import DraftContext, Sequences, Verdict
from ...target.buffers import NO_MEMORY
from ...target.captured_cache import CapturedCache
from ...target.recorded import first_runs
from ..drawn import Drawn, by_text
from ..steps import Several, Step, Steps, Took
from .head import Head
from .recorded import Recorded, can_be_recorded
from .states import States


class HeadRound(NamedTuple):
    """What a draft took, and what of that was for reading."""

    took: Took
    opened: int
    """tokens of prompts that it has read"""
    usual: bool
    """whether it has read no more than a round before it had added"""

    def tell(self, cost: DraftCost) -> None:
        """The device has made it."""
        if self.opened and not self.took.recorded:
            cost.observe_reading(self.took.ended.since(self.took.began), self.opened)
        self.took.tell(cost, self.usual)


class HeadSteps(Steps):
    """All places of a round are drafted at once, from the target's hidden states."""

    blind = True

    def __init__(
        self, context: DraftContext, head: Head, name: str, cost: DraftCost, candidates: int | None = None
    ) -> None:
        """
        Args:
            name: in the statistics.
            cost: told what drafts take.
            candidates: k, the likeliest tokens of each place, with their chances; None for one token as the call's
                sampling picks it.
        """
        self.context, self.head, self.name, self.cost, self.candidates = context, head, name, cost, candidates
        self.at_once, self.independent = head.at_once, head.independent
        # Behind a prompt that is no tokens nothing is drafted.
        self.features = head.features if context.most_rows or context.prompt_ids.shape[1] else ()
        self.states = States(context, head)
        self.recorded = Recorded(self.states) if can_be_recorded(context, head) else None
        self._all: Several
        """that this round has drafted"""
        self._round: HeadRound | None = None

    @property
    def unread(self) -> int:
        return self.states.unopened

    def room(self, sequences: Sequences) -> int:
        return self.head.most if self.features else 0

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self.states.follow(sequences.rows)
        opened, self.steps = self.states.unopened, 0
        usual = not opened and self.states.unread <= self.head.usual
        device, recorded, count = self.head.device, first_runs(), planned or steps
        began = mark(device)
        tokens, *more = self._drafted(sequences, count)
        ended = mark(device)
        self.context.stats.draft_calls += self.head.forwards * (1 if self.at_once else tokens.shape[1])
        first = ended if self.at_once else None
        self._round = HeadRound(Took(tokens.shape[1], began, first, ended, first_runs() > recorded), opened, usual)
        beside = more[0] if more else None
        self._all = Several(tokens, q=beside) if self.candidates is None else Several(tokens, chances=beside)

    def _drafted(self, sequences: Sequences, most: int) -> tuple[Tensor, ...]:
        """At least so many places, as `Drawn.all` gives them."""
        self._read_alone(sequences)
        cache = self.states.over()
        if self.recorded is not None and isinstance(cache, CapturedCache):
            return self.recorded.drafted(cache, sequences, self.candidates)
        drawn = Drawn(by_text(self.context, sequences, most, self.candidates))
        self.head.draft(self.states.news(sequences.tokens), cache, most, drawn.draw)
        if self.recorded is not None:
            try:
                self.states.cache = self.recorded.taken_over(self.states.over())
            except torch.OutOfMemoryError:
                warn(NO_MEMORY)
                self.recorded = None
        return drawn.all()

    def _read_alone(self, sequences: Sequences) -> None:
        """Rows that have joined others read their prompts by themselves: beside them every row would take as long."""
        texts, new = dict(zip(sequences.rows, sequences.tokens, strict=True)), self.states.new
        for row in new if len(new) < len(texts) else ():
            cache, news = self.states.empty(1), self.states.news_of(row, texts[row])
            drawn = Drawn(lambda logits, i: (logits.argmax(-1),))  # which nobody asks for
            self.head.draft(news, cache, 1, drawn.draw)
            self.states.join(row, cache)

    def step(self) -> Step:
        return self.several(1).only

    def several(self, count: int) -> Several:
        begun, self.steps = self.steps, self.steps + count
        return self._all.part(begun, count)

    def observe_prompt(self, verdict: Verdict) -> None:
        if self.features:
            self.states.observe_prompt(verdict)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        if self._round is not None:
            self._round.tell(self.cost)
            self._round = None
        self.steps = 0
        if self.features:
            self.states.observe(verdict)
