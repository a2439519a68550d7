"""`Drafting`: a drafter at work for some rows: its session, an order of draft and verify, and pauses where that loses.

It can only cost time: the session and the order are guarded.
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy

import torch
from torch import Tensor

from ..budget import Cost, CostView
from ..clock import Moment, mark, now
from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..schedule import Round
from ..stats import SpeculationStats
from ..target.ranks import Ranks
from ..verify.noise import Noise
from ..verify.picking import DraftPicker
from ..verify.processing import bans
from ..verify.randomness import Randomness
from .call import Call
from .guard import GuardedDrafter, GuardedSession, take_over
from .modes import Mode
from .own_schedule import GuardedSchedule, schedule_of
from .paying import Paying, record_of
from .ranks import SharedSession


def context_of(
    call: Call,
    device: torch.device,
    randomness: Randomness,
    cost: Cost,
    mode: Mode,
    noise: Noise | None,
) -> DraftContext:
    """What a session knows of its call. All of it is the session's own: whatever it does to it, nobody else reads it.

    Args:
        device: of the target's logits and ids.
        randomness: of draws of drafts.
        cost: of the target's forwards, the engine's own.
        noise: of coupled sampling.
    """
    processing, vocab = deepcopy(call.processing.of_drafts), call.ability.vocab_size
    grammars = call.processing.grammars
    return DraftContext(
        prompt_ids=call.input_ids.clone(),
        prompt_mask=call.prompt_mask.clone(),
        max_length=call.most_columns,
        vocab_size=vocab,
        eos_token_ids=call.stopping.eos,
        do_sample=call.draws,
        lockstep=not mode.ragged,
        trees=mode.trees,
        pick=DraftPicker(processing, vocab, call.draws, randomness, device, noise),
        device=device,
        stats=SpeculationStats(),
        forbids=bans(processing, vocab),
        cost=CostView(cost),
        target=call.target,
        source=call.source,
        coupled=noise is not None,
        grammar=grammars[0] if grammars and not call.processing.opaque else None,
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
        self.told, self.cost, self.device = context.stats, context.cost, context.device
        self.session: GuardedSession | SharedSession = (
            GuardedSession(drafter, context) if ranks is None else SharedSession(ranks, drafter, context)
        )
        self.order: GuardedSchedule | None = None
        """the drafter's own; None where drafting comes before verifying (Leviathan et al. 2023, Algorithm 1), and where
        rows come and go"""
        if not self.session.context.most_rows:
            self.order = schedule_of(drafter, self.session, context)
        self.traits = self.session.traits
        self.paying: Paying | None = None
        self._settling = 0.0
        """seconds that the last round's settling took"""
        self._early: tuple[Moment, Moment] | None = None
        """the beginning and the end of what was drafted early, for the next round"""
        self._for_this_round: tuple[Moment, Moment] | None = None
        """the same of what was drafted early for this one"""

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
        self.paying = Paying(record, keeps_state, self.order is not None, clock)

    def admit(self, row: int, own: Randomness) -> None:
        """A row has joined, with random numbers of its own."""
        self.session.tell(lambda _: self.randomness.admit(row, copy(own)))  # the session may have spoilt the others

    def forget(self, row: int) -> None:
        """Such a row has left."""
        self.session.tell(lambda _: self.randomness.forget(row))

    def draft(self, sequences: Sequences, room: list[int], most: int, pads: Sequence[int | None]) -> Draft:
        """What the target is fed of these rows, at most `room` [B] tokens one below the other.

        Args:
            most: nodes of a row.
            pads: as of `fit`.
        """
        self._early, self._for_this_round = None, self._early
        self.session.tell(lambda _: self.randomness.advance(sequences.rows))  # which it may have spoilt
        if self.paying is not None and self.paying.rests(len(room)):
            room = [0] * len(room)
        if self.order is None:
            draft = self.session.draft(sequences, room, most, pads)
        else:
            round = Round(sequences, room, [pad is not None for pad in pads], self.session.context.lockstep)
            draft = self.order.feed(round, most, pads)
        if self.paying is not None:
            self.paying.draws |= draft.token_probs is not None
        return draft

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        """Let a session that `drafts_early` draft on while the host reads what was accepted: a `Meanwhile`."""
        began = mark(self.device)
        self.session.tell(lambda session: session.draft_early(n, last))
        self._early = began, mark(self.device)

    def observe(self, verdict: Verdict) -> None:
        """What became of the draft."""
        if self.paying is not None:
            self.paying.observe(sum(map(len, verdict.tokens)), any(verdict.drafted))
        self.session.ask(lambda session: session.observe(verdict))
        settling = now()
        if self.order is not None:
            self.order.settle(verdict)
        self._settling = now() - settling

    @property
    def held_up(self) -> float:
        """Seconds for which this round was held up before it began: by the settling of the last one, and by what was
        drafted early. The device has done that."""
        early = self._for_this_round
        return self._settling + (0.0 if early is None else early[1].since(early[0]))

    def close(self, stats: SpeculationStats) -> None:
        """Nobody drafts any more; what the session has told goes into these statistics."""
        self.session.close()
        take_over(self.told, stats)
        said = [self.drafter.dropped] if self.drafter.dropped else [self.session.note()]
        if self.paying is not None and not self.drafter.dropped:
            said.append(self.paying.note())
        stats.notes += filter(None, said)
