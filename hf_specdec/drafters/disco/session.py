"""`DiscoSession`: a draft model that is asked after each token whether to draft one more (Mamou 2024, §3)."""

from typing import TYPE_CHECKING

from ...protocol import DraftContext
from ..draft_model import SteppedSession, Translated
from .classified import Classified
from .rules import StopRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DiscoSession(SteppedSession):
    """Drafts with a model until the rule says stop."""

    weighs = False  # a threshold knows nothing of costs

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        longest: int,
        classified: Classified,
        rule: StopRule,
    ) -> None:
        """
        Args:
            model: the draft model, which the classifier was trained for.
            longest: tokens of a round at most.
        """
        super().__init__(context, model, longest, classified)
        self.rule = rule

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        return [
            n if n <= step + 1 or self.rule.goes_on(seen) else step + 1
            for n, seen in zip(lengths, self.seen, strict=True)
        ]
