"""`Steps`: what drafts for a session, one place after the other. A draft model does, and heads do."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..budget import DRAFTED, GUESS, DraftCost, Evidence
from ..clock import Moment
from ..protocol import DraftContext, Feature, Runner, Sequences, Verdict


class Step(NamedTuple):
    """What a step gives."""

    tokens: Tensor
    """[B, k] candidates for the next place; the draft goes on from the first"""
    chances: Tensor | None = None
    """[B, k] that the model gives them, where several were asked for"""
    q: Tensor | None = None
    """[B, V] that the one candidate was drawn from; None where it is the likeliest one"""
    said: Sequence[float] | None = None
    """[B] on the host, what else speaks for the first, from 0 to 1, where anybody was asked"""


class Several(NamedTuple):
    """What steps give of γ places in a row."""

    tokens: Tensor
    """[B, γ, k]"""
    chances: Tensor | None = None
    """[B, γ, k]"""
    q: Tensor | None = None
    """[B, γ, V]"""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Several":
        """Step by step."""
        chances = [step.chances for step in steps if step.chances is not None]
        q = [step.q for step in steps if step.q is not None]
        return cls(
            torch.stack([step.tokens for step in steps], 1),
            torch.stack(chances, 1) if chances else None,
            torch.stack(q, 1) if q else None,
        )

    @classmethod
    def joined(cls, parts: "Sequence[Several]") -> "Several":
        """One behind the other."""
        if len(parts) == 1:
            return parts[0]
        together = [[each for each in all_of if each is not None] for all_of in zip(*parts, strict=True)]
        return cls(*(torch.cat(each, 1) if each else None for each in together))  # type: ignore[arg-type]

    def part(self, first: int, count: int) -> "Several":
        """So many places from this one on, or as many as there are."""
        return Several(*(None if each is None else each[:, first : first + count] for each in self))  # type: ignore

    @property
    def only(self) -> Step:
        """The one place that there is."""
        return Step(*(None if each is None else each[:, 0] for each in self))  # type: ignore[arg-type]


class Took(NamedTuple):
    """When steps were asked for."""

    steps: int
    began: Moment
    first: Moment | None
    """when the first one was there; None where all are one, or there is one only"""
    ended: Moment
    recorded: bool
    """whether a step was recorded meanwhile, or will be: that takes long, and happens once"""

    def tell(self, cost: DraftCost, usual: bool) -> None:
        """What they took; the device has made them."""
        if self.recorded:
            return
        seconds = self.ended.since(self.began)
        first = seconds / self.steps if self.first is None else self.first.since(self.began)
        cost.observe(self.steps, first, seconds, usual)


class Steps:
    """A round: `begin`, `step` once for each place, `end`, and `observe` when the target has judged."""

    context: DraftContext
    cost: DraftCost
    """of its steps"""
    name = "draft_model"
    """in the statistics, of what it drafts"""
    features: Sequence[Feature] = ()
    """of the target's forwards, as of `DraftSession`"""
    blind = False
    """whether steps are made without a look at what they give"""
    at_once = False
    """whether all steps of a round are one call: further ones cost nothing"""
    independent = False
    """whether a place's candidates are the same whatever stands before it in the draft"""
    slots_per_token = 1
    """as of `DraftSession`"""
    steps = 0
    """of this round"""

    def runner(self, runner: Runner) -> Runner:
        """As `DraftSession.runner`."""
        return runner

    @property
    @abstractmethod
    def unread(self) -> int:
        """Tokens of rows that it has not read anything of."""

    @abstractmethod
    def room(self, sequences: Sequences) -> int:
        """Steps that a round may have."""

    def serves(self, row: int) -> bool:
        """Whether it can draft for this row of the call yet."""
        return True

    def rest(self, sequences: Sequences, wanted: bool) -> None:
        """No step is made in this round.

        Args:
            wanted: whether some were to be made, of which it serves no row yet.
        """

    @abstractmethod
    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        """Behind the accepted tokens of these rows, at most `steps` steps.

        Args:
            planned: how many will be made, whatever they give, without a look at their logits.
        """

    @abstractmethod
    def step(self) -> Step:
        """One more place."""

    def several(self, count: int) -> Several:
        """So many more places, or as many as there are, without a look at any."""
        return Several.of([self.step() for _ in range(count)])

    def end(self) -> None:
        """No further step is made in this round."""

    @property
    def drafts_early(self) -> bool:
        """Whether `draft_early` may be called."""
        return False

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        """As `DraftSession.draft_early`."""

    def observe_prompt(self, verdict: Verdict) -> None:
        """The target has read prompts."""

    @abstractmethod
    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        """Of the first candidates that each row [B] went on from, so many are part of the text now. The device has
        done all that it was asked for."""

    def notes(self) -> list[str]:
        """For the statistics."""
        return []

    # ------------------------------------------------------------------ what its candidates are counted under

    def said(self, place: int, rank: int) -> Evidence:
        """What speaks for the candidate of a place (from 0) and rank, beside the chance that the model gives it."""
        return Evidence.of(DRAFTED, min(rank, 1))

    def evidence(self, place: int, rank: int) -> Sequence[Evidence]:
        """For one of which nobody has seen the chance; the last is the one that it is judged by."""
        return [Evidence.of(DRAFTED, rank)]

    def guess(self, place: int, rank: int) -> float:
        """How often such a one is right where all before it are, before anything was tested."""
        return GUESS * (1 - GUESS) ** rank
