"""`Classified`: what the stop classifier says of a round's tokens."""

from torch import Tensor

from ...protocol import DraftContext, Sequences
from .classifier import StopClassifier, read
from .config import DiscoConfig
from .lookup import NONE, Branch, Recurrence


class Classified:
    """Of each token, from the draft's distribution there and the tokens before it."""

    def __init__(self, context: DraftContext, config: DiscoConfig, classifier: StopClassifier) -> None:
        self.context, self.lookup, self.k = context, config.lookup, config.k
        self.chance = classifier.reader(context.do_sample)
        self.texts: dict[int, Recurrence] = {}
        """per row of the call, the accepted text"""
        self.known: dict[int, int] = {}
        """how many tokens of it are in there"""
        self.begins: dict[int, int] = {}
        """the column at which its answer does"""
        self.branches: list[Branch] = []
        """[B] each row's text with the round's draft"""
        self.positions: list[int] = []
        """[B] of the next token in each row's answer"""

    def begin(self, sequences: Sequences) -> None:
        """A round begins, behind each row's text as accepted so far."""
        self.texts, self.known = sequences.here(self.texts), sequences.here(self.known)
        self.begins = sequences.here(self.begins)
        for row, tokens, length in zip(sequences.rows, sequences.tokens, sequences.lengths, strict=True):
            self.begins.setdefault(row, self.context.prompt_ids.shape[1] or length - 1)
            self.texts.setdefault(row, Recurrence()).extend(tokens[self.known.get(row, 0) :])
            self.known[row] = len(tokens)
        self.branches = [Branch(self.texts[row]) for row in sequences.rows]
        self.positions = [n - self.begins[row] for n, row in zip(sequences.lengths, sequences.rows, strict=True)]

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None = None) -> tuple[list[float], list[int]]:
        """C [B] of the round's next tokens [B], from the logits [B, V]; and the tokens.

        Args:
            q: what the call's processors have made of the logits; the classifier goes by what the draft says itself.
        """
        reading = read(logits, self.k, tokens)
        proposed = [branch.proposal() if self.lookup else NONE for branch in self.branches]
        chances = self.chance(reading, self.positions, proposed)
        self.positions = [n + 1 for n in self.positions]
        for branch, token in zip(self.branches, reading.drawn, strict=True):
            branch.append(token)
        return chances, reading.drawn
