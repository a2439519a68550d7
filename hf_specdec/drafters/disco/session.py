"""`DiscoSession`: a draft model that goes on while the classifier's chance is at least τ (Mamou 2024, §3)."""

from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol import DraftContext, Sequences
from ..draft_model import SteppedSession, Translated
from ..draft_model.chain import Chain
from .classifier import NONE, Branch, Recurrence, StopClassifier, read
from .config import DiscoConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Classified:
    """The classifier's chance C of each drafted token, from the draft's distribution there and the tokens before it."""

    def __init__(self, context: DraftContext, config: DiscoConfig, classifier: StopClassifier) -> None:
        self.context, self.lookup, self.k = context, config.lookup, config.k
        self.chance = classifier.reader(context.do_sample)
        self.texts: dict[int, Recurrence] = {}
        """each row's accepted text, by the row's index in the call"""
        self.known: dict[int, int] = {}
        """how many of the row's tokens are in `texts`"""
        self.begins: dict[int, int] = {}
        """the column at which the row's answer begins"""
        self.branches: list[Branch] = []
        """[B] each row's text with this round's draft"""
        self.positions: list[int] = []
        """[B] of the next token in each row's answer"""

    def begin(self, sequences: Sequences) -> None:
        """A round begins, behind each row's accepted text."""
        self.texts, self.known = sequences.here(self.texts), sequences.here(self.known)
        self.begins = sequences.here(self.begins)
        for row, tokens, length in zip(sequences.rows, sequences.tokens, sequences.lengths, strict=True):
            self.begins.setdefault(row, self.context.prompt_ids.shape[1] or length - 1)
            self.texts.setdefault(row, Recurrence()).extend(tokens[self.known.get(row, 0) :])
            self.known[row] = len(tokens)
        self.branches = [Branch(self.texts[row]) for row in sequences.rows]
        self.positions = [n - self.begins[row] for n, row in zip(sequences.lengths, sequences.rows, strict=True)]

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None = None) -> tuple[list[float], list[int]]:
        """C [B] of the round's next tokens [B], from the draft's logits [B, V]; and those tokens on the host.

        Args:
            q: not used. The classifier reads the draft's own distribution, without the call's processors.
        """
        reading = read(logits, self.k, tokens)
        proposed = [branch.proposal() if self.lookup else NONE for branch in self.branches]
        chances = self.chance(reading, self.positions, proposed)
        self.positions = [n + 1 for n in self.positions]
        for branch, token in zip(self.branches, reading.drawn, strict=True):
            branch.append(token)
        return chances, reading.drawn


class ClassifiedChain(Chain):
    """A greedy chain with other candidates beside it: the first candidate's chance is the classifier's, the others'
    are the draft's own."""

    def __init__(
        self, context: DraftContext, model: "PreTrainedModel | Translated", candidates: int, classified: Classified
    ) -> None:
        super().__init__(context, model, candidates)
        self.classified = classified

    def begin(self, sequences: Sequences, steps: int) -> bool:
        self.classified.begin(sequences)
        return super().begin(sequences, steps)

    def said(self, logits: Tensor, tokens: Tensor, chances: Tensor) -> Tensor:
        chances[:, 0] = chances.new_tensor(self.classified.of(logits, tokens[:, 0])[0])
        return chances


class DiscoSession(SteppedSession):
    """Rule "token": drafts until the last token's chance falls below τ."""

    weighs = False  # τ knows nothing of costs, so the loop pauses drafts that lose time

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        longest: int,
        classified: Classified,
        tau: float,
    ) -> None:
        """
        Args:
            model: the draft model that the classifier was trained for.
            longest: SLmax, tokens of a round at most.
            tau: τ, a chance from 0 to 1.
        """
        super().__init__(context, model, longest, classified)
        self.tau = tau

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        return [
            n if n <= step + 1 or seen[-1] >= self.tau else step + 1 for n, seen in zip(lengths, self.seen, strict=True)
        ]
