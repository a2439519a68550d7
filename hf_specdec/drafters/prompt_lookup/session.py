"""`PromptLookupSession`: copies of a row's own text, as far as they pay."""

from ...budget import Survival
from ...protocol import Draft, DraftContext, Sequences
from ..trees import TreeSession
from .config import PromptLookupConfig
from .copies import Copies


class PromptLookupSession(TreeSession):
    """Drafts copies of the row's own text."""

    def __init__(self, context: DraftContext, config: PromptLookupConfig, survival: Survival) -> None:
        super().__init__(context, survival)
        self.copies = Copies(context, config, survival)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.copies.join(self.begin(len(budget)), sequences, budget)
        return self.draft()
