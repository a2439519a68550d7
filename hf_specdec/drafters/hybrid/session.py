"""`HybridSession`: copies and the draft model's tokens in one tree, as far as they pay."""

from ...protocol import Draft
from ..draft_model import GrowingSession
from ..prompt_lookup import PromptLookupConfig
from ..suffix import SuffixConfig
from ..suffix.memory import PAST
from .recycled import RECYCLED

NAMES = {"copied": PromptLookupConfig.drafter_type, PAST: SuffixConfig.drafter_type, RECYCLED: RECYCLED}
"""of sources, in the statistics"""


class HybridSession(GrowingSession):
    """In each round: look up copies; draft step by step while the next steps promise to pay; verify the likeliest."""

    def draft(self) -> Draft:
        draft = super().draft()
        draft.sources = [self._source(b) for b in range(len(self.trees))]
        return draft

    def _source(self, row: int) -> str:
        """Who drafted the nodes of a row."""
        names = {
            NAMES.get(kind[0], "draft_model")
            for node in self.ordered[row]
            for kind in self.trees[row].kinds[node]
            if isinstance(kind, tuple)
        }
        return "+".join(sorted(names)) or "none"
