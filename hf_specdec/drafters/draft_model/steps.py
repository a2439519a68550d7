"""`Steps`: what drafts for a session, one place after the other. A draft model does, and heads do."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...budget import DraftCost
from ...clock import Moment
from ...protocol import DraftContext, Feature, Sequences, Verdict


class Step(NamedTuple):
    """What a step gives."""

    tokens: Tensor
    """[B, k] candidates for the next place; the draft goes on from the first"""
    logits: Tensor | None = None
    """[B, V] of the draft; None of a step that was recorded with others"""
    chances: Tensor | None = None
    """[B, k] that it gives to the candidates, where several were asked for"""
    q: Tensor | None = None
    """[B, V] that the one candidate was drawn from; None where it is the likeliest one"""


class Took(NamedTuple):
    """When steps were asked for."""

    steps: int
    began: Moment
    first: Moment | None
    """when the first one was there; None where all are one, or there is one only"""
    ended: Moment
    recorded: bool
    """whether a step was recorded meanwhile, which takes long and happens once"""

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
    features: Sequence[Feature] = ()
    """of the target's forwards, as of `DraftSession`"""
    blind = False
    """whether steps are made without a look at what they give"""
    at_once = False
    """whether all steps of a round are one call: further ones cost nothing"""
    independent = False
    """whether a place's candidates are the same whatever stands before it in the draft"""
    steps = 0
    """of this round"""

    @property
    @abstractmethod
    def unread(self) -> int:
        """Tokens of rows that it has not read anything of."""

    @abstractmethod
    def room(self, sequences: Sequences) -> int:
        """Steps that a round may have."""

    @abstractmethod
    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        """Behind the accepted tokens of these rows, at most `steps` steps.

        Args:
            planned: how many will be made, whatever they give, without a look at their logits.
        """

    @abstractmethod
    def step(self) -> Step:
        """One more place."""

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
