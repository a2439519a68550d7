"""`BudgetedSession`: the budget's decision with the classifier's chances, in place of a threshold."""

from typing import TYPE_CHECKING

from ...budget import DraftCost, Stepwise, Survival
from ...protocol import DraftContext
from ..draft_model.stepping import Stepping
from .classifier import StopClassifier
from .config import DiscoConfig
from .session import DiscoSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BudgetedSession(Stepping, DiscoSession):
    """What is said of tokens are the classifier's chances."""

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel",
        config: DiscoConfig,
        classifier: StopClassifier,
        survival: Survival,
        cost: DraftCost,
    ) -> None:
        """
        Args:
            survival: how often drafts were right, by what the classifier said of them.
            cost: of this draft's steps, its classifier among them.
        """
        super().__init__(context, model, config, classifier)
        self.stepwise, self.draft_cost = Stepwise(survival), cost
