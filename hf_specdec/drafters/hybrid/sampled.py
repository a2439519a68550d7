"""`SampledHybridSession`: copies, or what the draft model draws."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...budget import DraftCost, Survival, most_per_second
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...target.inputs import position_limit
from ...theory import best_window, tokens_per_second
from ..draft_model import DraftModelSession
from ..draft_model.growing import LOOK_AGAIN
from ..draft_model.window import WindowTuner, why_rested
from ..merged import TreeSession
from ..prompt_lookup import Copies, PromptLookupConfig
from .config import HybridConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SampledHybridSession(TreeSession):
    """Tokens that are drawn at random are tested by the q that they were drawn from, and stay a chain of their own:
    they are accepted more often than the likeliest ones would be. A round takes what promises more per second."""

    def __init__(
        self,
        context: DraftContext,
        config: HybridConfig,
        model: "PreTrainedModel",
        survival: Survival,
        cost: DraftCost,
        tuner: WindowTuner,
    ) -> None:
        super().__init__(context, survival)
        self.config, self.draft_cost, self.tuner = config, cost, tuner
        """the tuner knows how often draws are accepted"""
        self.copies = Copies(context, config, survival)
        self.rounds = self.rested = 0
        """all, and those in which nothing promised to pay"""
        self._model = model
        self._limit = position_limit(model)
        self._drawing: DraftModelSession | None = None
        self._drew = False

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.rounds += 1
        self.copies.join(self.begin(len(budget)), sequences, budget)
        gamma = self._window(budget) if max(sequences.lengths) < self._limit else 0
        self._drew = gamma > 0
        if not self._drew:
            draft = self.draft()
            draft.sources = [PromptLookupConfig.drafter_type if length else "none" for length in draft.lengths]
            return draft
        opened = self._drawing is None  # and reads the prompt in this round
        if self._drawing is None:
            self._drawing = DraftModelSession(self.context, self._model, gamma, self.tuner)
        self._drawing.fixed_window = gamma
        draft = self._drawing.propose(sequences, budget)
        if (steps := max(draft.lengths)) and not opened:
            self.draft_cost.observe(self._drawing.seconds / steps)
        draft.sources = ["draft_model" if length else "none" for length in draft.lengths]
        return draft

    def _window(self, budget: list[int]) -> int:
        """γ of a chain of draws, where that promises more than the copies at hand; else 0."""
        cost, fixed, step = self.context.cost, self.config.num_draft_tokens, self.draft_cost.step
        if step is None or not cost.known:
            return self.tuner.window if fixed == "auto" else int(fixed)
        active = [b for b, room in enumerate(budget) if room > 0]
        rows, lockstep, seconds = len(active), self.context.lockstep, cost.round(len(budget))
        alpha, together = (self.tuner.alpha**rows, 1) if lockstep else (self.tuner.alpha, rows)
        gamma = best_window(alpha, seconds, step, self.tuner.largest) if fixed == "auto" else int(fixed)
        drawing = together * tokens_per_second(alpha, gamma, seconds, step)
        chances = [[chance for _, chance in self.ranked(b)] for b in active]
        copying = most_per_second(chances, seconds, lockstep=lockstep)[1]
        return max(gamma, 1) if self.draft_cost.asked(gamma > 0 and drawing > copying, LOOK_AGAIN) else 0

    def estimates(self, row: int) -> Sequence[float | None]:
        return [] if self._drew else super().estimates(row)

    def observe(self, verdict: Verdict) -> None:
        if self._drew and self._drawing is not None:
            self._drawing.observe(verdict)
        self.rested += not self._drew and not any(verdict.drafted)
        super().observe(verdict)
        self._drew = False

    def close(self) -> None:
        c = self.draft_cost.c(self.context.cost, len(self.context.prompt_ids))
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.tuner.alpha)
