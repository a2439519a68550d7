"""`Paying`: drafts only while that pays. For targets with a state, where a rejection costs a second forward."""

import time

from ..protocol import Draft, Verdict
from ..schedule import Correct, Round, Schedule

TRIAL = 2
"""rounds that are drafted for before it is asked whether they paid"""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""rounds"""
MEMORY = 0.9
"""weight of the past at each round"""


class Paying:
    """A schedule that is asked for drafts while these gain time. After losses it pauses, ever longer."""

    def __init__(self, inner: Schedule) -> None:
        self.inner = inner
        self.drafted, self.plain = Pace(), Pace()
        self.left, self.pause = (
            1,
            FIRST_PAUSE,
        )  # the first round is a plain one: there must be something to compare with
        """rounds without a draft that are still to come, and the length of the next pause"""
        self.tried = 0
        """rounds with drafts since the last pause"""
        self.rounds = self.rested = 0
        """all, and those without a draft because drafts had not paid"""
        self.began = 0.0
        self.now: Pace | None = None
        """whose round this is"""
        self.tokens = 0

    @property
    def correct(self) -> Correct | None:
        return self.inner.correct

    def feed(self, round: Round) -> Draft:
        now = time.perf_counter()
        if self.now is not None:
            self.now.add(self.tokens, now - self.began)
            self._decide()
        self.began, resting = now, self.left > 0
        self.rounds += 1
        self.rested += resting and self.rounds > 1
        self.now = self.plain if resting else self.drafted
        if not resting:
            return self.inner.feed(round)
        self.left -= 1
        return Draft.from_lists([[]] * len(round.room), round.sequences.ids.device)

    def _decide(self) -> None:
        if self.now is not self.drafted:
            return
        self.tried += 1
        if self.drafted.rate() > self.plain.rate():
            self.pause = FIRST_PAUSE
        elif self.tried >= TRIAL:
            self.left, self.pause, self.tried = self.pause, min(2 * self.pause, LONGEST_PAUSE), 0
            self.drafted = Pace()  # what comes is another text

    def note(self) -> str:
        """Why drafts were left out, if they were."""
        if not self.rested:
            return ""
        return (
            f"drafting was stopped in {self.rested} of {self.rounds} rounds, as it did not pay: a rejected draft costs "
            "this target, which keeps a state, a second forward"
        )

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        return self.inner.test(fed)

    def settle(self, verdict: Verdict) -> None:
        self.tokens = sum(map(len, verdict.tokens))
        self.inner.settle(verdict)


class Pace:
    """Tokens per second, of late."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds

    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0
