"""`HeadDrafter`: what drafters with heads have in common."""

from abc import abstractmethod
from typing import Any

from ...budget import MOST_NODES, Controller, DraftCost, Experience, Learned
from ...protocol import DraftContext
from ...session import DraftSession
from ...transfer import waits
from ..base import Drafter
from ..chains import ChainSession, candidates_of
from ..rules import Planned
from ..trees import TreeSession
from .draft import HeadDraft

CANDIDATES = 4
"""tokens thought of at each place of a greedy draft, of which those are verified that pay"""


class HeadDrafter(Drafter):
    """Drafts with heads that read the target's hidden states."""

    proposes_trees = True
    who = "the head"
    """drafts, in notes"""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._experience = Learned(Experience)  # what a call has measured serves the next one

    @abstractmethod
    def heads(self, context: DraftContext) -> HeadDraft:
        """The heads, for one call."""

    def steps(self, context: DraftContext, cost: DraftCost, candidates: int | None = None) -> HeadDraft:
        """The heads, as a session asks them.

        Args:
            cost, candidates: as of `HeadDraft`.
        """
        heads = self.heads(context)
        heads.name, heads.cost, heads.candidates = self.config.drafter_type, cost, candidates
        return heads

    def start(self, context: DraftContext) -> DraftSession:
        experience = self._experience.of(context.target, (context.rows, context.do_sample))
        heads = self.steps(context, experience.cost)
        if context.do_sample:  # a chain in every round: a seed gives one text
            control = Controller(context, experience, heads.most, who=self.who)
            return ChainSession(context, heads, Planned(control))
        k = heads.candidates = candidates_of(context, CANDIDATES)
        control = Controller(context, experience, candidates=k, who=self.who)
        seen = not (waits(context.device) or heads.recorded is not None)
        return TreeSession(context, control.acceptance, (), heads, control, seen, MOST_NODES)
