"""`Drafting`: a drafter at work for some rows: its session, an order of draft and verify, and pauses where that loses.

It can only cost time: the session and the order are guarded.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch

from ..budget import Cost, CostView
from ..clock import now
from ..protocol import Draft, DraftContext, Verdict
from ..schedule import Round, Schedule
from ..stats import SpeculationStats
from ..target.probe import ability
from ..target.ranks import Ranks
from ..verify.noise import Noise
from ..verify.picking import DraftPicker
from ..verify.processing import Bans
from ..verify.randomness import Randomness
from .call import Call
from .checks import MOST_FED, MOST_SUCCESSORS, whole
from .guard import GuardedDrafter, GuardedSession, take_over
from .modes import Mode
from .own_schedule import schedule_of
from .paying import Paying, record_of
from .ranks import SharedSession
from .serial import Serial


class Bounds(NamedTuple):
    """Of a batch whose rows come and go."""

    columns: int
    """that a row may come to"""
    rows: int
    """at once"""
    tokens: int
    """of those together"""


def context_of(
    call: Call,
    device: torch.device,
    randomness: Randomness,
    cost: Cost,
    mode: Mode,
    noise: Noise | None,
    bounds: Bounds | None = None,
) -> DraftContext:
    """What a session knows of its call. All of it is the session's own: whatever it does to it, nobody else reads it.

    Args:
        device: of the target's logits and ids.
        randomness: of draws of drafts.
        cost: of the target's forwards, the engine's own.
        noise: of coupled sampling.
        bounds: where rows come and go, of which the call is the first; None where all rows are there from the start.
    """
    processing, vocab = deepcopy(call.processing), ability(call.target).vocab_size
    nobody = call.input_ids.new_empty(0, 0)
    return DraftContext(
        prompt_ids=call.input_ids.clone() if bounds is None else nobody,
        prompt_mask=call.prompt_mask.clone() if bounds is None else nobody,
        max_length=call.most_columns if bounds is None else bounds.columns,
        vocab_size=vocab,
        eos_token_ids=call.stopping.eos,
        do_sample=call.draws,
        lockstep=not mode.ragged,
        trees=mode.trees,
        pick=DraftPicker(processing, vocab, call.draws, randomness, device, noise),
        device=device,
        stats=SpeculationStats(),
        forbids=Bans(processing, vocab) or None,
        cost=CostView(cost),
        target=call.target,
        source=call.source,
        coupled=noise is not None,
        most_rows=0 if bounds is None else bounds.rows,
        most_tokens=0 if bounds is None else bounds.tokens,
        forwards=call.rules.forwards,
    )


class Drafting:
    """One session, from its opening to its end."""

    def __init__(
        self,
        drafter: GuardedDrafter,
        context: DraftContext,
        randomness: Randomness,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            context: the session's own.
            randomness: what the session's draws come from.
            ranks: over which the target is spread.
        """
        self.drafter, self.randomness = drafter, randomness
        self.told, self.cost, self.device, self.vocab = context.stats, context.cost, context.device, context.vocab_size
        self.context = context  # what was taken of it above the session cannot spoil
        self.session: GuardedSession | SharedSession = (
            GuardedSession(drafter, context) if ranks is None else SharedSession(ranks, drafter, context)
        )
        self.schedule: Schedule = Serial(self.session)
        self.paying: Paying | None = None
        self.serial = True
        """whether drafting comes before verifying"""
        self.waited = 0.0
        """seconds for which the schedule held the next round up"""

    def arrange(self, takes_order: bool = True) -> None:
        """Ask what is to be known before the first round. The runner has been made.

        Args:
            takes_order: whether the drafter may bring an order of its own to draft and verify.
        """
        ask = self.session.ask
        likeliest = ask(lambda session: whole("likeliest", session.likeliest, 0, MOST_SUCCESSORS)) or 0
        self.likeliest = min(likeliest, self.vocab)
        self.slots_per_token = ask(lambda session: whole("slots_per_token", session.slots_per_token, 1, MOST_FED)) or 1
        self.weighs = bool(ask(lambda session: bool(session.weighs)))
        if takes_order:
            self.schedule = schedule_of(self.drafter, self.session, self.context, self.device, self.vocab)
            self.serial = isinstance(self.schedule, Serial)

    def pause_where_it_loses(
        self,
        target: object,
        do_sample: bool,
        keeps_state: bool = False,
        joined: bool = False,
        clock: Callable[[], float] = now,
    ) -> None:
        """Leave drafts out while they take more time than they gain.

        Args:
            keeps_state: whether the target does, so that a rejection costs a second forward.
            joined: whether rows come and go; one record serves any number of them.
            clock: seconds of rounds.
        """
        kind = self.drafter.drafter, id(target), do_sample
        record = (lambda rows: record_of(*kind, "joined")) if joined else (lambda rows: record_of(*kind, rows))
        self.schedule = self.paying = Paying(self.schedule, record, keeps_state, not self.serial, clock)

    def feed(self, round: Round, beside: int = 0) -> Draft:
        """What the target verifies of these rows.

        Args:
            beside: how many rows of others there are in the same forward.
        """
        self.session.tell(lambda _: self.randomness.advance(round.sequences.rows))  # which it may have spoilt
        self.cost.beside = beside
        return self.schedule.feed(round)

    def observe(self, verdict: Verdict) -> None:
        """What became of the draft."""
        if self.paying is not None:
            self.paying.observe(sum(map(len, verdict.tokens)))
        self.session.ask(lambda session: session.observe(verdict))
        settling = now()
        self.schedule.settle(verdict)
        self.waited = now() - settling

    def close(self, stats: SpeculationStats) -> None:
        """Nobody drafts any more; what the session has told goes into these statistics."""
        self.session.close()
        take_over(self.told, stats)
        said = [self.drafter.dropped] if self.drafter.dropped else [self.session.note()]
        if self.paying is not None and not self.drafter.dropped:
            said.append(self.paying.note())
        stats.notes += filter(None, said)
