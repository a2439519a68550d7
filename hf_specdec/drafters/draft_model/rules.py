"""Stop rules, how far a chain is drafted: `Planned` says it before it is drafted, `Stepwise` after each token."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from torch import Tensor

from ...budget import DRAFTED, Controller, Drafted, Evidence
from ...protocol import Sequences, Verdict
from ...transfer import to_host
from .steps import Step, Steps


class StopRule(Protocol):
    """Whether a token is verified must never depend on that token, where it was drawn at random: a rule knows the
    tokens up to i, and decides about token i + 1, which nobody has drawn yet."""

    weighs: bool
    """whether it weighs what a draft gains against what it costs; a user's number is not to be weighed either"""
    planned: bool
    """whether `begin` says how many steps are made, and `lengths` is not asked"""

    def begin(self, sequences: Sequences, room: list[int], most: int, model: Steps) -> int:
        """Steps of this round at most; 0 where nothing is drafted."""

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        """[B] how many tokens rows draft in all, of which i + 1 are there."""

    def observe(self, verdict: Verdict) -> None:
        """What became of the chains."""

    def notes(self) -> list[str]:
        """For the statistics."""


class Estimate(Protocol):
    """What speaks for a token that was drafted, from 0 to 1."""

    def begin(self, sequences: Sequences) -> None:
        """A round begins, behind these rows."""

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None) -> list[float]:
        """[B] of a round's next tokens [B], from the logits [B, V] and the distribution q [B, V] that they were drawn
        from; None where they are the likeliest ones."""


class Own:
    """The chance that the draft itself gave a draw."""

    def begin(self, sequences: Sequences) -> None:
        """It goes by the draw alone."""

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None) -> list[float]:
        assert q is not None, "of what is not drawn"
        return to_host(q.gather(1, tokens[:, None])[:, 0])


class Planned:
    """The controller says before each round how many tokens are drafted: a number that the user has set, or, where
    looking at each token would have to be waited for, the one that promises most."""

    weighs = planned = True

    def __init__(self, control: Controller) -> None:
        self.control = control

    def begin(self, sequences: Sequences, room: list[int], most: int, model: Steps) -> int:
        rows = [b for b, limit in enumerate(room) if limit > 0]
        left = model.context.max_length - max(sequences.lengths)
        here = Drafted(sequences.rows, [[]] * len(rows), [1.0] * len(rows), 0, model.unread, left)
        return self.control.plan(here, most, enough=most)

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        """As planned."""
        return lengths

    def observe(self, verdict: Verdict) -> None:
        self.control.observe_chains(verdict)

    def notes(self) -> list[str]:
        return self.control.notes()


class Stepwise:
    """The controller is asked after each token, by estimates of those that are there, whether the batch drafts on."""

    weighs, planned = True, False

    def __init__(self, control: Controller, estimate: Estimate) -> None:
        self.control, self.estimate = control, estimate
        self.seen: list[list[float]] = []
        """[B] the estimates of the round's tokens"""
        self._rows: Sequence[int] = []
        self._active: list[int] = []
        """rows that may draft; others of a lockstep batch are finished"""

    def begin(self, sequences: Sequences, room: list[int], most: int, model: Steps) -> int:
        self.seen, self._rows = [[] for _ in room], sequences.rows
        self._active = [b for b, limit in enumerate(room) if limit > 0]
        left = model.context.max_length - max(sequences.lengths)
        steps = self.control.plan(self._drafted([True] * len(room), model.unread, left), most)
        if steps:
            self.estimate.begin(sequences)
        return min(most, self.control.longest) if steps else 0

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        assert step.logits is not None, "not of a plan"
        said = self.estimate.of(step.logits, step.tokens[:, 0], step.q)
        for b, chance in enumerate(said):
            if lengths[b] > i:
                self.seen[b].append(chance)
        on = [n > i + 1 for n in lengths]
        return lengths if not any(on) or self.control.goes_on(self._drafted(on)) else [min(n, i + 1) for n in lengths]

    def _drafted(self, on: Sequence[bool], unread: int = 0, left: int = 1) -> Drafted:
        chances = [self._kept(self.seen[b]) for b in self._active]
        onward = [(row[-1] if row else 1.0) * on[b] for b, row in zip(self._active, chances, strict=True)]
        return Drafted(self._rows, chances, onward, max(map(len, self.seen), default=0), unread, left)

    def _kept(self, said: Sequence[float]) -> list[float]:
        """The chance of each token of a row, that it and all before it are kept."""
        acceptance, evidence = self.control.acceptance, Evidence.of(DRAFTED)
        return list(accumulate((acceptance.calibrated(evidence.at(chance)) for chance in said), mul))

    def observe(self, verdict: Verdict) -> None:
        for said, count, accepted in zip(self.seen, tested(verdict), verdict.accepted, strict=bool(self.seen)):
            for i, chance in enumerate(said[:count][: accepted + 1]):
                self.control.acceptance.observe(Evidence.of(DRAFTED).at(chance), i < accepted)
        self.seen = []
        self.control.observe_chains(verdict)

    def notes(self) -> list[str]:
        return self.control.notes()


def tested(verdict: Verdict) -> list[int]:
    """[B] drafted tokens that may have been tested: where a round ends for another row's sake, nothing is known of what
    is behind its end."""
    return [min(drafted, len(text)) for drafted, text in zip(verdict.drafted, verdict.tokens, strict=True)]
