"""`Drafting`: one session for rows that come and go. It can only cost time, as in `generate`."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from ..budget import Cost
from ..protocol import Draft, DraftContext, Runner, Sequences, Verdict
from ..schedule import AnyDrafter, Round, Schedule
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..target.ragged import RaggedRunner
from ..verify.picking import DraftPicker
from ..verify.processing import Bans, Processing
from ..verify.randomness import RowRandomness
from .checks import successors_of
from .guard import GuardedDrafter, GuardedSession
from .own_runner import behind_own
from .paying import Paying, record_of
from .serial import Serial
from .session_stats import take_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .rows import Row


class Drafting:
    """A drafter's session, in an order of draft and verify, paused where drafts do not pay."""

    def __init__(
        self,
        drafter: AnyDrafter,
        model: "PreTrainedModel",
        cost: Cost,
        clock: Callable[[], float],
        first: "Row",
        vocab: int,
        most_columns: int,
        most_rows: int,
        most_tokens: int,
    ) -> None:
        """
        Args:
            cost: of the target's forwards, the engine's own.
            clock: seconds of rounds.
            first: the row for whose settings it is opened.
            most_columns: that a row may come to.
            most_rows: at once.
            most_tokens: of all rows together.
        """
        call, device = first.call, input_device(first.call.target)
        self.cost, self.stats, self.randomness = cost, SpeculationStats(), RowRandomness()
        do_sample = call.draws
        noise = call.judge(self.randomness, self.stats, joined=True).noise
        processing = Processing(call.processing.processors)
        context = DraftContext(
            prompt_ids=first.call.input_ids.new_empty(0, 0),
            prompt_mask=first.call.input_ids.new_empty(0, 0),
            max_length=most_columns,
            vocab_size=vocab,
            eos_token_ids=call.stopping.eos,
            do_sample=do_sample,
            lockstep=False,
            trees=True,
            pick=DraftPicker(processing, vocab, do_sample, self.randomness, device, noise),
            device=device,
            stats=self.stats,
            forbids=Bans(processing, vocab) or None,
            cost=cost.copy(),
            target=model,
            coupled=noise is not None,
            most_rows=most_rows,
            most_tokens=most_tokens,
        )
        self.guarded = GuardedDrafter(drafter)
        self.session = GuardedSession(self.guarded, context, cost)
        if self.session.ask(lambda session: tuple(session.features)):
            self.session.drop("it reads the target's hidden states, which BatchDecoder does not keep")
        self.slots_per_token = self.session.ask(lambda session: session.slots_per_token) or 1
        self.likeliest = self.session.ask(lambda session: successors_of(session, vocab)) or 0
        self.schedule: Schedule = Serial(self.session)
        self.paying: Paying | None = None
        if not self.session.ask(lambda session: bool(session.weighs)):
            record = record_of(drafter, id(model), do_sample, "joined")  # one for all: how many rows there are changes
            self.schedule = self.paying = Paying(self.schedule, lambda rows: record, keeps_state=False, clock=clock)

    def runner(self, engine: RaggedRunner) -> Runner:
        """The session's own around the engine's."""
        return behind_own(engine, self.guarded, self.session)

    def draft(self, sequences: Sequences, rows: Sequence["Row"], room: list[int], beside: int) -> Draft:
        """At most `room` tokens per row, in a forward with so many other rows beside them."""
        for row in rows:
            if row.number not in self.randomness.of:
                self.randomness.of[row.number] = copy(row.randomness)
            self.randomness.of[row.number].round += 1
        self.session.cost = self.cost.copy(beside)
        return self.schedule.feed(Round(sequences, room, [False] * len(room), lockstep=False))

    def observe(self, verdict: Verdict) -> None:
        """What became of the draft."""
        if self.paying is not None:
            self.paying.observe(sum(map(len, verdict.tokens)))
        self.session.ask(lambda session: session.observe(verdict))
        self.schedule.settle(verdict)

    def forget(self, row: int) -> None:
        """A row has left."""
        self.randomness.of.pop(row, None)

    def close(self) -> SpeculationStats:
        """Nobody drafts any more; what the session has told."""
        self.session.close()
        told = SpeculationStats()
        take_over(self.stats, told)
        said = [self.guarded.dropped] if self.guarded.dropped else [self.session.note()]
        said += [self.paying.note()] if self.paying is not None else []
        told.notes += filter(None, said)
        return told
