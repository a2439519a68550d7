"""`DiscoSession`: a draft model that is asked after each token whether to draft one more (Mamou 2024, §3)."""

from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol import Draft, DraftContext, Sequences
from ..draft_model import DraftModelSession
from .classified import Classified
from .classifier import StopClassifier
from .config import DiscoConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DiscoSession(DraftModelSession):
    """Drafts with a model until the rule says stop.

    The rule is asked after token i about drafting token i + 1. It knows q up to position i and earlier tokens, and
    token i is verified either way: which positions are verified never depends on the token drawn there, so the output
    keeps the target's distribution. Asking before the forward at i + 1 saves that forward, too.
    """

    weighs = False  # a threshold knows nothing of costs

    def __init__(
        self, context: DraftContext, model: "PreTrainedModel", config: DiscoConfig, classifier: StopClassifier
    ) -> None:
        """
        Args:
            model: the draft model, which `classifier` was trained for.
        """
        super().__init__(context, model, config.max_draft_tokens)
        self.rule = config.stop_rule(context.do_sample)
        self.classified = Classified(context, config, classifier)
        self.seen: list[list[float]] = []
        """[B] the chances C_1 … C_i of the round"""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.seen = [[] for _ in budget]
        self.classified.begin(sequences)
        return super().propose(sequences, budget)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        chances, drawn = self.classified.of(logits, tokens)
        for b, chance in enumerate(chances):
            if lengths[b] > step:
                self.seen[b].append(chance)
        return self.stopped(step, self.until_eos(step, drawn, lengths))

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        """[B] tokens that rows draft in all, of which `step + 1` are there and have their chances."""
        return [
            n if n <= step + 1 or self.rule.goes_on(seen) else step + 1
            for n, seen in zip(lengths, self.seen, strict=True)
        ]
