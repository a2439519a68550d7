"""`HybridSession`: copies and the draft model's tokens in one tree, as far as they pay."""

from typing import TYPE_CHECKING

from ...budget import DraftCost, Survival
from ...protocol import Draft, DraftContext
from ..draft_model import GrowingSession
from ..prompt_lookup import Copies, PromptLookupConfig
from .config import HybridConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HybridSession(GrowingSession):
    """In each round: look up copies; draft step by step while the next steps promise to pay; verify the likeliest."""

    def __init__(
        self,
        context: DraftContext,
        config: HybridConfig,
        model: "PreTrainedModel",
        survival: Survival,
        cost: DraftCost,
    ) -> None:
        copies = Copies(context, config, survival)
        super().__init__(context, model, config.num_draft_tokens, config.num_candidates, survival, cost, copies)

    def draft(self) -> Draft:
        draft = super().draft()
        draft.sources = [self._source(b) for b in range(len(self.trees))]
        return draft

    def _source(self, row: int) -> str:
        """Who drafted the nodes of a row."""
        names = {
            PromptLookupConfig.drafter_type if kind[0] == "copied" else "draft_model"
            for node in self.ordered[row]
            for kind in self.trees[row].kinds[node]
            if isinstance(kind, tuple)
        }
        return "+".join(sorted(names)) or "none"
