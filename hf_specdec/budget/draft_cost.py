"""`DraftCost`: what a draft model's steps take, and when it is asked."""

from collections.abc import Sequence

from .allowance import Allowance
from .cost import Cost, running_mean
from .decision import Advance

LOOK_STEPS = 2
"""steps of the draft model, where it is asked though that is not said to pay"""
LEAST = 0.1
"""plain rounds that this is taken for at least: times are not known that well"""
HOLDS = 8
"""rounds for which it holds at most that it does not pay: to find out takes a part of a round"""


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
        self.allowance = Allowance()
        """of looks: it is asked though that is not said to pay"""
        self._met = False
        self._readings = 0

    def begin(self) -> "DraftCost":
        """Another text."""
        self.allowance.begin()
        if self._readings == 1:  # which may have been slow, as a first one: else it might never be tried again
            self.reading /= 2
        return self

    def pass_by(self) -> None:
        """It is not asked in this round, as was known before."""
        self.allowance.wait()
        self.unasked += 1

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
        """A prompt of so many tokens was read in this time. Before the first one reading takes nothing; until the
        second one, half of it with each call."""
        if tokens:
            self.reading = min(self.reading or seconds / tokens, seconds / tokens)
            self._readings += 1

    def asked(
        self,
        pays: bool,
        cost: Cost,
        rows: int = 1,
        unread: float = 0.0,
        steps: int = LOOK_STEPS,
        candidates: int = 1,
    ) -> float | None:
        """Whether to ask the draft model in this round: where that pays, and from time to time where it does not.

        Args:
            cost: of the target's forwards over so many rows: the more a look takes, the rarer it is.
            unread: seconds that the prompt takes, where it was not read yet.
            steps: of a look.
            candidates: tokens that each of them gives to verify.

        Returns:
            None where it is not asked; else the price of this look, in plain rounds, and 0 where it pays or where
            nothing is known yet.
        """
        price = 0.0 if pays or not cost.known else self._price(cost, rows, unread, steps, candidates)
        asked = not price or self.allowance.try_for(price)
        self.unasked = 0 if asked else self.unasked + 1
        return price if asked else None

    def kept(self, tokens: Sequence[int], price: float, cost: Cost, advance: Advance) -> None:
        """In a round so many [B] of its tokens, that nobody else had proposed, were kept in each row.

        Args:
            price: of the look that this was; 0 where it was none.
            cost: of the target's forwards, which may have other rows in them.
            advance: what a batch's tokens are worth; of rows that advance together, what all of them keep.
        """
        if price:
            each = min(tokens) if advance.lockstep else sum(tokens) / (len(tokens) + cost.beside)
            worth = advance.tokens([1 + each] * len(tokens)) / len(tokens)
            self.allowance.gain(worth - 1, price)

    def _price(self, cost: Cost, rows: int, unread: float, steps: int, candidates: int) -> float:
        """Plain rounds that a look takes beside its own."""
        seconds, again = cost.round(rows), self.look if self.unasked else 0.0
        drafting = again or self.opening + steps * (self.step or 0.0)
        return max((seconds(1 + candidates * steps) + unread + drafting) / seconds(1) - 1, LEAST)


class Rest:
    """Rounds of one call in which it is known that its draft model is not asked."""

    def __init__(self, cost: DraftCost) -> None:
        self.cost = cost
        self._left = 0
        self._rows: list[int] = []
        """for which it was found out"""

    def begin(self, rows: Sequence[int]) -> None:
        """These rows do not ask it now, and what speaks against it will hardly change before it is tried again."""
        self._left, self._rows = min(HOLDS, self.cost.allowance.away), list(rows)

    def goes_on(self, rows: Sequence[int]) -> bool:
        """Whether this round is one of them. Asked once a round."""
        if self._left == 0 or self._rows != list(rows):
            return False
        self._left -= 1
        self.cost.pass_by()
        return True
