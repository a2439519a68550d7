"""`DraftCost`: what a draft model's steps take, and when it is asked."""

from collections.abc import Sequence
from math import inf

from .cost import Cost, running_mean

LOOK_AGAIN, LOOKS = 12, 0.02
"""rounds after which a draft model is asked again where it has not paid, at least; and the share of the time that this
may take"""
LOOK_STEPS = 2
"""steps of the draft model, where it is asked again"""
PAUSED = 4
"""rounds in which nothing is decided anew where nothing paid: to decide takes time, too"""
LONGEST_LOOK = 4
"""times as many rounds, where looks have not paid several times in a row: each doubles what follows"""
GIVEN, CHEAP = 4, 1.5
"""looks that are not as rare as they take long: what it may cost to get to know a draft model; and rounds that each of
them may take, and one that follows a round of which tokens were kept"""
RAREST = 1024
"""rounds after which it is asked again in any case: what a look seemed to take may have been disturbed"""


class DraftCost:
    """What a draft model's steps take, and for how long it was not asked."""

    def __init__(self) -> None:
        self.step: float | None = None
        """seconds"""
        self.opening = 0.0
        """seconds that a round with any takes beside them: what was accepted meanwhile is read, a tree is grown"""
        self.reading = 0.0
        """seconds per token of a prompt, which it reads when a call asks it first; of a long one, as short ones take
        longer per token"""
        self.look = 0.0
        """seconds that drafting takes where it is asked again: what the text grew by meanwhile is read, too"""
        self.unasked = 0
        """rounds since it was asked last"""
        self.looks = 0
        """how often in a row it was asked though that did not pay"""
        self.given = GIVEN
        """looks of this kind that are left"""
        self._met = self._read = False

    def begin(self) -> "DraftCost":
        """For another text: there the draft model may be right, so looks are as frequent as at first."""
        self.looks = 0
        return self

    def observe(self, seconds: float) -> None:
        """One draft step took this long. The first one takes longer than those that follow: it does not count."""
        if self._met:
            self.step = running_mean(self.step, seconds)
        self._met = True

    def c(self, cost: Cost, rows: int) -> float | None:
        """A step over a step of the target; None where one of them is not known yet."""
        return self.step / cost.round(rows)(1) if self.step is not None and cost.known else None

    def observe_draft(self, steps: int, first: float, seconds: float, usual: bool = True) -> None:
        """A round drafted so many steps in `seconds`; the first one, which reads what was accepted meanwhile, was there
        after `first`.

        Args:
            usual: whether what it read is no more than usual.
        """
        if steps > 1:
            self.observe((seconds - first) / (steps - 1))
        elif seconds < self.step if self.step is not None else usual:
            self.observe(seconds)
        opening = max(seconds - steps * (self.step or 0.0), 0.0)
        if self.step is not None and (usual or opening < self.opening):  # what reads more takes no less
            self.opening = running_mean(self.opening or self.step, opening)

    def observe_look(self, seconds: float) -> None:
        """It was asked again, and took so long beside reading the prompt."""
        self.look = running_mean(self.look or None, seconds)

    def observe_reading(self, seconds: float, tokens: int) -> None:
        """A prompt of so many tokens was read in this time. The first one takes longer than those that follow: it does
        not count, and until there is another one reading takes nothing."""
        if tokens and self._read:
            self.reading = min(self.reading or seconds / tokens, seconds / tokens)
        self._read |= tokens > 0

    def asked(
        self, pays: bool, cost: Cost | None = None, rows: int = 1, unread: float = 0.0, right: bool = False
    ) -> bool:
        """Whether to ask the draft model in this round: where that pays, and from time to time where it does not.

        Args:
            cost: of the target's forwards over so many rows: the more a look takes, the rarer it is.
            unread: seconds that the prompt takes, where it was not read yet.
            right: whether `was_right` in the round before. Then it may have gained about what it took, and the text
                may be one on which it is right: it is asked once more.
        """
        if pays or (right and self._taken(cost, rows, self._bare_look) <= CHEAP):
            self.looks = self.unasked = 0
            return True
        taken = self._taken(cost, rows, unread + (self.look or self._bare_look))
        given = self.given > 0 and taken <= CHEAP
        self.unasked += 1
        if self.unasked < self._look_again(taken, given):
            return False
        self.looks, self.given, self.unasked = self.looks + 1, self.given - given, 0
        return True

    def pauses(self) -> bool:
        """Whether it is not even thought of in this round."""
        paused = self.unasked % PAUSED > 0
        self.unasked += paused
        return paused

    @property
    def _bare_look(self) -> float:
        """Seconds of drafting of a look that has no pause behind it."""
        return self.opening + LOOK_STEPS * (self.step or 0.0)

    def _look_again(self, taken: float, given: bool) -> float:
        """Rounds from one look to the next, which takes so many beside its own."""
        longer = LOOK_AGAIN * min(2**self.looks, LONGEST_LOOK)
        return longer if given or taken == inf else min(max(longer, taken / LOOKS), RAREST)

    def _taken(self, cost: Cost | None, rows: int, drafting: float) -> float:
        """Rounds that a look with so many seconds of drafting takes beside its own; infinite where it is not known."""
        if cost is None or not cost.known or self.step is None:
            return inf
        seconds = cost.round(rows)
        return (seconds(2) + drafting) / seconds(1) - 1


def was_right(drafted: Sequence[object], kept: int) -> bool:
    """Whether as many tokens were kept as rows had something drafted.

    Args:
        drafted: [B] what each row had, or how much of it.
    """
    return kept >= sum(map(bool, drafted)) > 0
