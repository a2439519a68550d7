"""`Threshold`: DISCO's stop rule for a draft model's chains (Mamou 2024, §3)."""

from ...protocol import Sequences, Verdict
from ..draft_model import ModelDraft, Step
from .classified import Classified
from .rules import StopRule


class Threshold:
    """Each row drafts until the rule says stop."""

    weighs = False  # a threshold knows nothing of costs

    def __init__(self, classified: Classified, rule: StopRule, longest: int) -> None:
        """
        Args:
            longest: tokens of a round at most.
        """
        self.classified, self.rule, self.longest = classified, rule, longest
        self.seen: list[list[float]] = []
        """[B] the classifier's chances of the round's tokens"""

    def begin(self, sequences: Sequences, budget: list[int], most: int, model: ModelDraft) -> int:
        self.seen = [[] for _ in budget]
        self.classified.begin(sequences)
        return min(most, self.longest)

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        chances, _ = self.classified.of(step.logits, step.tokens[:, 0])
        for b, chance in enumerate(chances):
            if lengths[b] > i:
                self.seen[b].append(chance)
        return [
            n if n <= i + 1 or self.rule.goes_on(seen) else i + 1 for n, seen in zip(lengths, self.seen, strict=True)
        ]

    def observe(self, verdict: Verdict) -> None:
        """The classifier was trained before."""

    def notes(self) -> list[str]:
        return []
