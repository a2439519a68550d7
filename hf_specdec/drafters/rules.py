"""Stop rules, how far a chain is drafted: `Planned` says it before it is drafted, `Stepwise` after each token."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Protocol

from ..budget import DRAFTED, Controller, Drafted, Evidence
from ..protocol import Verdict
from ..transfer import to_host
from .steps import Step


class StopRule(Protocol):
    """Whether a token is verified must never depend on that token, where it was drawn at random: a rule knows the
    tokens up to i, and decides about token i + 1, which nobody has drawn yet."""

    weighs: bool
    """whether it weighs what a draft gains against what it costs; a user's number is not to be weighed either"""
    planned: bool
    """whether `begin` says how many steps are made, and `lengths` is not asked"""

    def begin(self, here: Drafted, room: list[int], most: int) -> int:
        """Steps of this round at most; 0 where nothing is drafted."""

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        """[B] how many tokens rows draft in all, of which i + 1 are there."""

    def observe(self, verdict: Verdict, kept: list[int]) -> None:
        """What became of the chains; `kept` as in `Controller.observe`."""

    def notes(self) -> list[str]:
        """For the statistics."""


class Planned:
    """The controller says before each round how many tokens are drafted: a number that the user has set, or, where
    looking at each token would have to be waited for, the one that promises most."""

    weighs = planned = True

    def __init__(self, control: Controller) -> None:
        self.control = control

    def begin(self, here: Drafted, room: list[int], most: int) -> int:
        return self.control.plan(here, most, enough=most)

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        """As planned."""
        return lengths

    def observe(self, verdict: Verdict, kept: list[int]) -> None:
        self.control.observe_chains(verdict, kept)

    def notes(self) -> list[str]:
        return self.control.notes()


class Stepwise:
    """The controller is asked after each token, by what speaks for those that are there, whether to draft on."""

    weighs, planned = True, False

    def __init__(self, control: Controller) -> None:
        self.control = control
        self.seen: list[list[float]] = []
        """[B] what speaks for the round's tokens"""
        self._here = Drafted([], [], [])
        self._active: list[int] = []
        """rows that may draft; others of a lockstep batch are finished"""

    def begin(self, here: Drafted, room: list[int], most: int) -> int:
        self.seen, self._here = [[] for _ in room], replace(here, unread=0, left=1)
        self._active = [b for b, limit in enumerate(room) if limit > 0]
        return min(most, self.control.longest) if self.control.plan(here, most) else 0

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        for b, chance in enumerate(spoken_for(step)):
            if lengths[b] > i:
                self.seen[b].append(chance)
        on = [n > i + 1 for n in lengths]
        return lengths if not any(on) or self.control.goes_on(self._drafted(on)) else [min(n, i + 1) for n in lengths]

    def _drafted(self, on: Sequence[bool]) -> Drafted:
        chances = [self._kept(self.seen[b]) for b in self._active]
        onward = [(row[-1] if row else 1.0) * on[b] for b, row in zip(self._active, chances, strict=True)]
        steps = max(map(len, self.seen), default=0)
        return replace(self._here, chances=chances, onward=onward, steps=steps)

    def _kept(self, said: Sequence[float]) -> list[float]:
        """The chance of each token of a row, that it and all before it are kept."""
        acceptance, evidence = self.control.acceptance, Evidence.of(DRAFTED)
        return list(accumulate((chance for _, chance in acceptance.calibrated([evidence] * len(said), said)), mul))

    def observe(self, verdict: Verdict, kept: list[int]) -> None:
        for said, count, accepted in zip(self.seen, tested(verdict), verdict.accepted, strict=bool(self.seen)):
            for i, chance in enumerate(said[:count][: accepted + 1]):
                self.control.acceptance.observe(Evidence.of(DRAFTED).at(chance), i < accepted)
        self.seen = []
        self.control.observe_chains(verdict, kept)

    def notes(self) -> list[str]:
        return self.control.notes()


def spoken_for(step: Step) -> list[float]:
    """[B] what speaks for a step's tokens, from 0 to 1: where nobody says more, the chance by which each was drawn."""
    if step.said is not None:
        return list(step.said)
    assert step.q is not None, "of what is not drawn"
    return to_host(step.q.gather(1, step.tokens)[:, 0])


def tested(verdict: Verdict) -> list[int]:
    """[B] drafted tokens that may have been tested: where a round ends for another row's sake, nothing is known of what
    is behind its end."""
    return [min(drafted, len(text)) for drafted, text in zip(verdict.drafted, verdict.tokens, strict=True)]
