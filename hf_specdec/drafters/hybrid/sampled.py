"""`SampledHybridSession`: copies, or what the draft model draws."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...budget import DraftCost, Survival, most_per_second
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...target.inputs import position_limit
from ...theory import best_window, tokens_per_second
from ..draft_model import DraftModelSession
from ..draft_model.window import WindowTuner
from .config import HybridConfig
from .copying import CopyingSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SampledHybridSession(CopyingSession):
    """Tokens that are drawn at random are tested by the q that they were drawn from, and stay a chain of their own:
    they are accepted more often than the likeliest ones would be. A round takes what promises more per second."""

    def __init__(
        self,
        context: DraftContext,
        config: HybridConfig,
        model: "PreTrainedModel",
        survival: Survival,
        draft_cost: DraftCost,
        tuner: WindowTuner,
    ) -> None:
        super().__init__(context, config, survival, draft_cost)
        self.tuner = tuner
        """knows how often draws are accepted"""
        self._draft_model = model
        self._limit = position_limit(model)
        self._drawing: DraftModelSession | None = None
        self._drew = False

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.copy(sequences, budget)
        gamma = self._window() if max(sequences.lengths) < self._limit else 0
        self._drew, self.declined = gamma > 0, gamma == 0
        if not self._drew:
            return self.draft()
        opened = self._drawing is None  # and reads the prompt in this round
        if self._drawing is None:
            self._drawing = DraftModelSession(self.context, self._draft_model, gamma, self.tuner)
        self._drawing.fixed_window = gamma
        draft = self._drawing.propose(sequences, budget)
        if (steps := max(draft.lengths)) and not opened:
            self.draft_cost.observe(self._drawing.seconds / steps)
        draft.sources = ["draft_model" if length else "none" for length in draft.lengths]
        return draft

    def _window(self) -> int:
        """γ of a chain of draws, where that promises more than the copies at hand; else 0."""
        cost, fixed, step = self.cost, self.config.num_draft_tokens, self.draft_cost.step
        if step is None or not cost.known:
            return self.tuner.window if fixed == "auto" else int(fixed)
        rows, lockstep, seconds = len(self.active), self.context.lockstep, cost.round(len(self.trees))
        alpha, together = (self.tuner.alpha**rows, 1) if lockstep else (self.tuner.alpha, rows)
        gamma = best_window(alpha, seconds, step, self.tuner.largest) if fixed == "auto" else int(fixed)
        drawing = together * tokens_per_second(alpha, gamma, seconds, step)
        copying = most_per_second(self.chances(), seconds, lockstep=lockstep)[1]
        return max(gamma, 1) if self.asked(gamma > 0 and drawing > copying) else 0

    def estimates(self, row: int) -> Sequence[float | None]:
        return [] if self._drew else super().estimates(row)

    def observe(self, verdict: Verdict) -> None:
        if self._drew and self._drawing is not None:
            self._drawing.observe(verdict)
        super().observe(verdict)
        self._drew = False

    def close(self) -> None:
        self.why_rested(self.tuner.alpha)
