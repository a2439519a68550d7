"""`SampledHybridSession`: copies, or what the draft model draws."""

from typing import TYPE_CHECKING

from ...budget import Cost, Survival, most_per_second
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...target.inputs import position_limit
from ...theory import tokens_per_second
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
        self._draft_model = model
        self._limit = position_limit(model)
        self._drawing: DraftModelSession | None = None
        self._drew = False

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.copy(sequences, budget)
        self.choose()
        self._drew = max(sequences.lengths) < self._limit and self._drawing_pays()
        if not self._drew:
            return self.chosen_draft()
        if self._drawing is None:
            window = self.config.num_draft_tokens
            self._drawing = DraftModelSession(self.context, self._draft_model, window, self.tuner)
        draft = self._drawing.propose(sequences, budget)
        draft.sources = ["draft_model" if length else "none" for length in draft.lengths]
        return draft

    def _drawing_pays(self) -> bool:
        """Whether a chain of draws promises more than the copies at hand. Where there are none, the window says so."""
        tuner, cost, rows = self.tuner, self.cost, len(self.trees)
        if not any(self.trees) or tuner.draft_seconds is None or not cost.known:
            return True
        fixed, lockstep = self.config.num_draft_tokens, self.context.lockstep
        gamma = tuner.window if fixed == "auto" else int(fixed)
        alpha, together = (tuner.alpha**rows, 1) if lockstep else (tuner.alpha, rows)
        drawing = together * tokens_per_second(alpha, gamma, cost.round(), tuner.draft_seconds)
        return drawing > most_per_second(self.chances(), cost.round(), lockstep=lockstep)[1]

    def observe(self, verdict: Verdict) -> None:
        if self._drew and self._drawing is not None:
            self._drawing.observe(verdict)
            self.spent = self._drawing.seconds
        elif verdict.seconds > 0:
            self.tuner.observe_verify(verdict.width, verdict.seconds)
        super().observe(verdict)
        self._drew = False

    def close(self) -> None:
        if self._drawing is not None:
            self._drawing.close()
