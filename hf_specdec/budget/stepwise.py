"""`Stepwise`: whether one more token of a chain pays, by what was said of those that are there."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from .acceptance import Acceptance, Evidence
from .decision import SUMMED, Advance, steps_that_pay

DRAWN = Evidence.of("drawn")
"""evidence of every token; with a band, what was said of it"""
FIRST_GUESS = 0.6


class Stepwise:
    """Chances are what was said of tokens, as often as that came true.

    What is decided after a token is about the next one, which nobody has drawn yet, and all that is drawn is verified:
    the output keeps the target's distribution.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance

    @property
    def alpha(self) -> float:
        """How often the draft is right."""
        return self.acceptance.chance(DRAWN, FIRST_GUESS)

    def pays(
        self,
        seen: Sequence[Sequence[float]],
        open: Sequence[bool],
        seconds: Callable[[int], float],
        step: float,
        advance: Advance = SUMMED,
        opening: float = 0.0,
    ) -> bool:
        """
        Args:
            seen: [B][any] what was said of the tokens that each row has drafted.
            open: [B] whether a row drafts on.
            seconds: duration of a round by the width of its forward.
            step: seconds of a draft step.
            advance: as in `most_per_second`.
            opening: seconds that a round's first step takes beside its own.
        """
        chances = [self._survivals(said) for said in seen]
        steps = max(map(len, chances), default=0)
        kept = [mine[-1] if mine else 1.0 for mine in chances]
        likely = [[self.alpha]] * len(seen)
        onward = [chance * goes_on for chance, goes_on in zip(kept, open, strict=True)]
        spent, opening = (steps * step + opening, 0.0) if steps else (0.0, opening)
        return steps_that_pay(chances, onward, likely, seconds, step, spent, advance, opening, enough=1) > 0

    def _survivals(self, said: Sequence[float]) -> list[float]:
        """The chance of each token of a row, that it and all before it are kept."""
        return list(accumulate((self.acceptance.calibrated(DRAWN.at(chance)) for chance in said), mul))

    def observe(self, said: Sequence[float], accepted: int) -> None:
        """Of a row's drafted tokens the first so many were accepted."""
        for i, chance in enumerate(said[: accepted + 1]):
            self.acceptance.observe(DRAWN, i < accepted)
            self.acceptance.observe(DRAWN.at(chance), i < accepted)
