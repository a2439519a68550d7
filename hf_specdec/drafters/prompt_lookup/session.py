"""`PromptLookupSession`: copies of a row's own text, as far as they pay."""

from ...budget import Acceptance
from ...protocol import Draft, DraftContext, Sequences
from ..trees import TreeSession
from .config import PromptLookupConfig
from .copies import Copies


class PromptLookupSession(TreeSession):
    """Drafts copies of the row's own text."""

    def __init__(self, context: DraftContext, config: PromptLookupConfig, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.copies = Copies(context, config, acceptance)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.copies.join(self.begin(len(room)), sequences, room)
        return self.draft()
