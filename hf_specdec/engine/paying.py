"""`Paying`: drafts only while that pays. For sessions that do not weigh it themselves, and for targets with a state,
where a rejection costs a second forward.

Either of two schedules orders a round: the drafter's own, or plain decoding; what they gave of late decides.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from ..budget import Learned
from ..clock import now
from ..protocol import Draft, Verdict
from ..schedule import Correct, Round, Schedule

TRIAL, FIRST_TRIAL, LATER_TRIAL = 2, 8, 4
"""rounds that are drafted for before it is asked whether they paid: for a target with a state; else at first and after
a pause"""
LEAST_TRIAL = 3
"""rounds, however many rows there are"""
FIRST_PAUSE, LONGEST_PAUSE = 8, 128
"""rounds"""
GIVEN, CREDIT = 3, 6
"""plain rounds that drafting may lose, those that it gained before taken off, until it pauses: eight rounds show little
of a drafter that gains a fifth, and a pause costs that (the first ones are not made up for either, once for each number
of rows that calls begin with); and how many gained ones count. Not for targets with a state"""
TOO_MUCH = 6
"""plain rounds; a trial that has lost more ends at once"""
HARDLY = 0.05
"""tokens gained per row and round, below which no time could make drafts pay: seen sooner than what they take"""
COSTS, LONGEST_MADE_UP = 0.02, 1024
"""share of the time that trials which do not pay may take: the more one lost, the longer the pause behind it, up to so
many rounds"""
MEMORY = 0.9
"""weight of the past at each round"""
PLAIN_FIRST = 2
"""rounds without a draft before the first drafts, where it is to be known from the start what these take"""
SHOCK = 4
"""plain rounds that a single round may be held to have lost: what disturbs a machine once is not the draft's fault"""
LITTLE = 1.5
"""tokens per row and round, below which it is found out what a plain round takes"""


class Pace:
    """Tokens per second, of late."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds

    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Record:
    """What is known of a drafter from call to call."""

    drafted: Pace = field(default_factory=Pace)
    plain: Pace = field(default_factory=Pace)
    left: int = 0
    """rounds without a draft that are still to come"""
    pause: int = FIRST_PAUSE
    """the length of the next one"""
    tried: int = 0
    """rounds with drafts since the last pause"""
    seen: int = 0
    """rows of those rounds, where something was verified"""
    gained: int = 0
    """tokens that they gave beyond one per row"""
    lost: float = 0.0
    """seconds by which they took longer than plain decoding would have taken for their tokens; below 0 where less"""
    paused: bool = False
    """whether there ever was one"""


_records: Learned[Record] = Learned(Record)
"""by drafter"""


def record_of(drafter: Any, *key: Hashable) -> Record:
    """What is known of it; of a drafter that cannot be told from others, nothing."""
    try:
        return _records.of(drafter, key)
    except TypeError:
        return Record()


class Paying:
    """A schedule that is asked for drafts while these gain time. After losses it pauses, ever longer."""

    def __init__(
        self,
        inner: Schedule,
        record: Callable[[int], Record],
        keeps_state: bool,
        own_order: bool = False,
        clock: Callable[[], float] = now,
    ) -> None:
        """
        Args:
            record: by the number of rows in a round.
            keeps_state: whether the target does.
            own_order: whether the drafter has brought its schedule, which goes by a clock itself.
            clock: seconds of rounds.
        """
        self.clock = clock
        self.inner, self.keeps_state, self.own_order = inner, keeps_state, own_order
        self._record_of, self.record = record, Record()
        self.draws = False
        """whether drafts are drawn at random: a seed would give another text where they are left out by the clock"""
        self.met: set[bool] = set()
        """kinds of rounds, resting or not, that this call has had: what a first one begins takes longer"""
        self.debt = Record()
        """of calls that begin with as many rows: what was lost with any number of them is made up for with all"""
        self.rounds = self.rested = 0
        """all, and those without a draft because drafts had not paid"""
        self.began = 0.0
        self.resting = self.first = True
        """whether the present round has no draft, and whether it is the first such one of this call, or with one"""
        self.tokens = self.rows = 0
        self.verified = False
        """whether the present round's draft holds anything"""

    @property
    def correct(self) -> Correct | None:
        return self.inner.correct

    def feed(self, round: Round) -> Draft:
        began = self.clock()
        if self.rounds:
            self._account(began - self.began)
        else:
            self.debt = self._record_of(-len(round.room))
        if self.rows != len(round.room):
            self.record, self.rows = self._record_of(len(round.room)), len(round.room)
            if (self.keeps_state or self.own_order) and not self.record.plain.seconds:
                self.record.left = PLAIN_FIRST
        record, debt = self.record, self.debt
        self.began, self.resting = began, record.left > 0 or debt.left > 0
        self.rounds += 1
        self.rested += self.resting and (record.paused or debt.left > 0)
        self.first = self.resting not in self.met
        self.met.add(self.resting)
        if not self.resting:
            draft = self.inner.feed(round)
            self.draws |= draft.token_probs is not None
            self.verified = any(draft.lengths)
            return draft
        for known in (record,) if debt is record else (record, debt):
            known.left = max(0, known.left - 1)
        return self.inner.feed(replace(round, room=[0] * len(round.room)))

    def _account(self, seconds: float) -> None:
        """What the last round took. A first one of its kind is no sign of the pace, but what it lost is lost."""
        record = self.record
        if not self.first:
            (record.plain if self.resting else record.drafted).add(self.tokens, seconds)
        plain = record.plain.rate()
        if self.resting or (self.draws and not (self.keeps_state or self.own_order)):
            return
        record.gained += self.tokens - self.rows
        if plain:
            plain_round = self.rows / plain
            record.lost = max(
                record.lost + min(seconds - self.tokens / plain, SHOCK * plain_round), -CREDIT * plain_round
            )
        if not self.first:
            self._decide(record, plain)

    def _decide(self, record: Record, plain: float) -> None:
        record.tried, record.seen = record.tried + 1, record.seen + self.rows * self.verified
        if record.drafted.rate() > plain if plain else self.tokens >= LITTLE * self.rows:
            record.pause = FIRST_PAUSE
            if not plain:
                record.tried = record.seen = record.gained = 0
        elif self._has_failed(record, record.lost * plain / self.rows):
            learning = 0 if self.debt.paused or self.keeps_state else GIVEN  # what getting to know a drafter may cost
            made_up_for = (record.lost * plain / self.rows - learning) / COSTS
            record.left = min(max(record.pause, round(made_up_for)), LONGEST_MADE_UP)
            self.debt.left = max(self.debt.left, record.left)
            record.pause = min(2 * record.pause, LONGEST_PAUSE)
            record.tried = record.seen = record.gained = 0
            record.lost, record.paused, self.debt.paused = 0.0, True, True
            if self.keeps_state:
                record.drafted = Pace()  # what comes is another text

    def _has_failed(self, record: Record, lost: float) -> bool:
        """Whether drafting, which gives less than plain decoding of late, has lost so many plain rounds that it pauses.
        Each row of a batch is a round of a trial."""
        if self.keeps_state:
            return record.tried >= TRIAL or lost > TOO_MUCH
        hardly = record.gained < HARDLY * record.seen
        if lost > TOO_MUCH or (hardly and record.seen >= FIRST_TRIAL):
            return True
        trial = max(LEAST_TRIAL, (LATER_TRIAL if record.paused else FIRST_TRIAL) // self.rows)
        return record.tried >= trial and (hardly or lost > GIVEN or not record.plain.seconds)

    def note(self) -> str:
        """Why drafts were left out, if they were."""
        if not self.rested:
            return ""
        why = "this model keeps a recurrent state, so that every rejected draft costs a second forward"
        if not self.keeps_state:
            why = "plain decoding was as fast"
        return f"drafting was paused in {self.rested} of {self.rounds} rounds, as it did not pay: {why}"

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        return self.inner.test(fed)

    def observe(self, tokens: int) -> None:
        """A round gave so many tokens."""
        self.tokens = tokens

    def settle(self, verdict: Verdict) -> None:
        self.inner.settle(verdict)
