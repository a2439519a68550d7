"""`DiscoSession`: a draft model that is asked after each token whether to draft one more (Mamou 2024, §3)."""

from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol import Draft, DraftContext, Sequences
from ..draft_model import DraftModelSession
from .classifier import Reading, StopClassifier, read
from .config import DiscoConfig
from .lookup import NONE, Branch, Recurrence

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
        self.chance = classifier.reader(context.do_sample)
        self.lookup, self.k = config.lookup, config.k
        self.texts: dict[int, Recurrence] = {}
        """per row of the call, the accepted text"""
        self.known: dict[int, int] = {}
        """how many tokens of it are in there"""
        self.begins: dict[int, int] = {}
        """the column at which its answer does"""
        self.seen: list[list[float]] = []
        """[B] the chances C_1 … C_i of the round"""
        self.branches: list[Branch] = []
        """[B] each row's text with the round's draft"""

    def chances(self, step: int, reading: Reading, sequences: Sequences, branches: list[Branch]) -> list[float]:
        """C [B] of draft token `step` (from 0), from the draft's distribution there and the tokens before it."""
        position = [n + step - self.begins[row] for n, row in zip(sequences.lengths, sequences.rows, strict=True)]
        proposed = [branch.proposal() if self.lookup else NONE for branch in branches]
        return self.chance(reading, position, proposed)

    def _branches(self, sequences: Sequences) -> list[Branch]:
        """A branch of each row's text as accepted so far."""
        self.texts, self.known = sequences.here(self.texts), sequences.here(self.known)
        self.begins = sequences.here(self.begins)
        for row, tokens, length in zip(sequences.rows, sequences.tokens, sequences.lengths, strict=True):
            self.begins.setdefault(row, self.context.prompt_ids.shape[1] or length - 1)
            self.texts.setdefault(row, Recurrence()).extend(tokens[self.known.get(row, 0) :])
            self.known[row] = len(tokens)
        return [Branch(self.texts[row]) for row in sequences.rows]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.seen = [[] for _ in budget]
        self.branches = self._branches(sequences)
        return super().propose(sequences, budget)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        reading = read(logits, self.k, tokens)
        chances, drawn = self.chances(step, reading, sequences, self.branches), reading.drawn
        shorter = self.until_eos(step, drawn, lengths)
        for b, chance in enumerate(chances):
            if lengths[b] > step:
                self.seen[b].append(chance)
        shorter = self.stopped(step, shorter)
        for branch, token in zip(self.branches, drawn, strict=True):
            branch.append(token)
        return shorter

    def stopped(self, step: int, lengths: list[int]) -> list[int]:
        """[B] tokens that rows draft in all, of which `step + 1` are there and have their chances."""
        return [
            n if n <= step + 1 or self.rule.goes_on(seen) else step + 1
            for n, seen in zip(lengths, self.seen, strict=True)
        ]
