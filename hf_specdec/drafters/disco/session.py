"""`Threshold`: DISCO's stop rule, and the classifier's chances that it goes by (Mamou 2024, §3)."""

from torch import Tensor

from ...budget import Drafted
from ...protocol import DraftContext, Sequences, Verdict
from ..rules import spoken_for
from ..steps import Step
from .classifier import NONE, Branch, Recurrence, StopClassifier, read
from .config import DiscoConfig


class Classified:
    """The classifier's chance C of each drafted token, from the draft's distribution there, the token, and those before
    it."""

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

    def of(self, logits: Tensor, tokens: Tensor) -> list[float]:
        """C [B] of the round's next tokens [B], from the draft's logits [B, V]: its own distribution, without the
        call's processors."""
        reading = read(logits, tokens, self.k)
        proposed = [branch.proposal() if self.lookup else NONE for branch in self.branches]
        chances = self.chance(reading, self.positions, proposed)
        self.positions = [n + 1 for n in self.positions]
        for branch, token in zip(self.branches, reading.tokens, strict=True):
            branch.append(token)
        return chances


class Threshold:
    """Each row drafts until the classifier's chance of its last token falls below τ."""

    planned = False
    weighs = False  # τ knows nothing of costs, so drafts that lose time are paused

    def __init__(self, tau: float, longest: int) -> None:
        """
        Args:
            tau: τ, from 0 to 1.
            longest: SLmax, tokens of a round at most.
        """
        self.tau, self.longest = tau, longest

    def begin(self, here: Drafted, room: list[int], most: int) -> int:
        return min(most, self.longest)

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        said = zip(lengths, spoken_for(step), strict=True)
        return [n if n <= i + 1 or chance >= self.tau else i + 1 for n, chance in said]

    def observe(self, verdict: Verdict, kept: list[int]) -> None:
        """The round is over. τ stays."""

    def notes(self) -> list[str]:
        return []
