"""`SampledHybridSession`: copies, or what the draft model draws."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...budget import Cost, Survival, most_per_second
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
        cost: Cost,
        tuner: WindowTuner,
    ) -> None:
        super().__init__(context, config, survival, cost)
        self.tuner = tuner
        """knows how often draws are accepted"""
        self._draft_model = model
        self._limit = position_limit(model)
        self._drawing: DraftModelSession | None = None
        self._drew = False

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.copy(sequences, budget)
        self.choose()
        gamma = self._window() if max(sequences.lengths) < self._limit else 0
        self._drew = gamma > 0
        if not self._drew:
            self.rested += not any(self.chosen)
            return self.chosen_draft()
        if self._drawing is None:
            self._drawing, self.opened = DraftModelSession(self.context, self._draft_model, gamma, self.tuner), True
        self._drawing.fixed_window = gamma
        draft = self._drawing.propose(sequences, budget)
        self.spent = self._drawing.seconds
        if (steps := max(draft.lengths)) and not self.opened:
            self.cost.observe_step(self.spent / steps)
        draft.sources = ["draft_model" if length else "none" for length in draft.lengths]
        return draft

    def _window(self) -> int:
        """γ of a chain of draws, where that promises more than the copies at hand; else 0."""
        cost, fixed, step = self.cost, self.config.num_draft_tokens, self.cost.draft_step
        if step is None or not cost.known:
            return self.tuner.window if fixed == "auto" else int(fixed)
        rows, lockstep = len(self.active), self.context.lockstep
        alpha, together = (self.tuner.alpha**rows, 1) if lockstep else (self.tuner.alpha, rows)
        gamma = best_window(alpha, cost.round(), step, self.tuner.largest) if fixed == "auto" else int(fixed)
        drawing = together * tokens_per_second(alpha, gamma, cost.round(), step)
        copying = most_per_second(self.chances(), cost.round(), lockstep=lockstep)[1]
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
