"""`JoinedSession`: drafts without a model."""

from ...budget import MOST_NODES, Acceptance
from ...protocol import Draft, DraftContext, Sequences
from ..sources import Sources
from ..trees import TreeSession


class JoinedSession(TreeSession):
    """Without a model: what the sources propose, greedy or sampled, of which the engine verifies what pays."""

    most = MOST_NODES

    def __init__(self, context: DraftContext, acceptance: Acceptance, sources: Sources) -> None:
        super().__init__(context, acceptance, sources)
        self.sources = sources

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.sources.join(self.begin(len(room)), sequences, room)
        return self.draft()
