"""`Paying`: drafts only while that pays. For sessions that do not weigh it themselves, and for targets with a state,
where a rejection costs a second forward. Each round with drafts is held against a plain one: what it loses is charged
to an `Account`, and while that has nothing left, rounds go without drafts."""

from collections.abc import Callable, Hashable
from typing import Any

from ..budget import SAVED, Account, Learned, Times
from ..clock import now

TRIAL = 4
"""rounds in a row of an order of the drafter's own: the first ones only begin what later ones gain from"""
NOTHING_FED = 0.5
"""plain rounds that one may lose at most in which the draft was empty: to think of nothing takes time, too"""
LITTLE = 1.5
"""tokens per row and round, below which it is found out what a plain round takes"""


class Record:
    """What is known of a drafter from call to call."""

    def __init__(self) -> None:
        self.account = Account()
        self.plain: dict[int, Times] = {}
        """by rows, of rounds without a draft"""
        self.drafted: dict[int, Times] = {}
        """the same of rounds with one"""
        self.is_set = False
        """whether these stay what they are, and every round with a draft counts as one of them"""

    def rounds(self, rows: int) -> tuple[float, float] | None:
        """Seconds of a plain round and of one with a draft; None before both are known."""
        known = [times[rows].seconds for times in (self.plain, self.drafted) if rows in times and times[rows].known]
        return (known[0], known[1]) if len(known) == 2 else None

    def set_to(self, rows: int, rounds: tuple[float, float] | None) -> None:
        """These are the times, as of `rounds`; None observes them again."""
        if rounds is not None:
            self.plain, self.drafted = ({rows: Times((seconds, seconds))} for seconds in rounds)
        elif self.is_set:
            self.plain, self.drafted = {}, {}
        self.is_set = rounds is not None

    def plain_round(self, rows: int) -> float:
        """Seconds for so many rows, or for the number closest to that; 0 where none is known."""
        known = [n for n, times in self.plain.items() if times.known]
        return self.plain[min(known, key=lambda n: abs(n - rows))].seconds if known else 0.0


_records: Learned[Record] = Learned(Record)
"""by drafter"""


def record_of(drafter: Any, *key: Hashable) -> Record:
    """What is known of it; of a drafter that cannot be told from others, nothing."""
    try:
        return _records.of(drafter, key)
    except TypeError:
        return Record()


class Paying:
    """Of one call, in which there are drafts while the account lasts."""

    def __init__(
        self,
        record: Callable[[int], Record],
        keeps_state: bool,
        own_order: bool = False,
        clock: Callable[[], float] = now,
    ) -> None:
        """
        Args:
            record: by the number of rows that the call begins with.
            keeps_state: whether the target does.
            own_order: whether the drafter has brought its schedule, which goes by a clock itself.
            clock: seconds of rounds.
        """
        self.keeps_state, self.own_order, self.clock = keeps_state, own_order, clock
        self._record_of, self.record = record, Record()
        self.draws = False
        """whether drafts are drawn at random: a seed would give another text where they are left out by the clock"""
        self.rounds = self.paused = 0
        """all, and those without a draft because drafts had not paid"""
        self.began = 0.0
        self.resting = False
        """whether the present round has no draft"""
        self.drafted = 0
        """rounds with drafts since the last one without"""
        self.looks = 0
        """rounds without a draft still to come, to find out what they take"""
        self.tokens = self.rows = 0
        self.fed = False
        """whether anything was drafted in the last round"""

    def rests(self, rows: int) -> bool:
        """Whether the round that begins now, of so many rows, goes without a draft."""
        began = self.clock()
        if self.rounds:
            self._account(began - self.began)
        else:
            self.record = self._record_of(rows)
            if self.keeps_state or self.own_order:
                self._look(rows)
        self.began, self.rows, self.rounds = began, rows, self.rounds + 1
        pauses = self.record.account.left < 0 and self.drafted % (TRIAL if self.own_order else 1) == 0
        self.resting = pauses or self.looks > 0
        if self.resting:
            self.record.account.wait()
            self.paused, self.looks, self.drafted = self.paused + pauses, max(0, self.looks - 1), 0
        else:
            self.drafted += 1
        return self.resting

    def _look(self, rows: int) -> None:
        """Have rounds without a draft, of which the first is no measure, if none were timed."""
        self.looks = 0 if self.record.plain_round(rows) else 2

    def _account(self, seconds: float) -> None:
        """What the last round took."""
        record, account = self.record, self.record.account
        if record.is_set:
            (seconds,) = (times.seconds for times in record.drafted.values())
        else:
            times = record.plain if self.resting else record.drafted
            times[self.rows] = times.get(self.rows, Times()).add(seconds)
        if self.resting:
            return
        if self.draws and not (self.keeps_state or self.own_order):
            return
        gained = self.tokens / self.rows
        if plain := record.plain_round(self.rows):
            # What disturbs a machine for one round is not the draft's fault, even less where there was none.
            account.charge(min(seconds / plain - gained, SAVED if self.fed else NOTHING_FED))
        elif gained < LITTLE:
            self._look(self.rows)

    def note(self) -> str:
        """Why drafts were left out, if they were."""
        if not self.paused:
            return ""
        why = "this model keeps a recurrent state, so that every rejected draft costs a second forward"
        if not self.keeps_state:
            why = "plain decoding was as fast"
        return f"drafting was paused in {self.paused} of {self.rounds} rounds, as it did not pay: {why}"

    def observe(self, tokens: int, fed: bool) -> None:
        """A round gave so many tokens, with a draft or with an empty one."""
        self.tokens, self.fed = tokens, fed
