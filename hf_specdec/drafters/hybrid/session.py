"""`HybridSession`: copies and the draft model's tokens in one tree, as far as they pay."""

from ...protocol import Draft
from ..draft_model import GrowingSession
from .sources import named


class HybridSession(GrowingSession):
    """In each round: look up copies; draft step by step while the next steps promise to pay; verify the likeliest."""

    def draft(self) -> Draft:
        draft = super().draft()
        draft.sources = named(self.trees, self.ordered)
        return draft
