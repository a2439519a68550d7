"""`HybridSession`: copies and the draft model's tokens in one tree, as far as they pay."""

from typing import TYPE_CHECKING

from ...budget import DraftCost, Survival
from ...protocol import Draft, DraftContext, Verdict
from ..draft_model import GrowingSession
from ..prompt_lookup import PromptLookupConfig
from ..suffix import SuffixConfig
from ..suffix.memory import PAST
from .sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = {"copied": PromptLookupConfig.drafter_type, PAST: SuffixConfig.drafter_type}
"""of sources, in the statistics"""


class HybridSession(GrowingSession):
    """In each round: look up copies; draft step by step while the next steps promise to pay; verify the likeliest."""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel",
        window: int | str,
        candidates: int,
        survival: Survival,
        cost: DraftCost,
        sources: Sources,
    ) -> None:
        super().__init__(context, model, window, candidates, survival, cost, sources)
        self.sources = sources

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

    def observe(self, verdict: Verdict) -> None:
        self.sources.observe(verdict)
        super().observe(verdict)

    def close(self) -> None:
        self.sources.close()
        super().close()
