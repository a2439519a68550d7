"""`Chain`: a draft model that drafts step by step, as long as it is asked to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol import DraftContext, Sequences, Verdict
from .session import model_over_cache, with_room, write_tokens
from .translating import Translated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Chain:
    """One forward of the draft model per step, over its own cache. It goes on from the first of the candidates."""

    def __init__(self, context: DraftContext, model: "PreTrainedModel | Translated", candidates: int) -> None:
        self.context, self.candidates = context, candidates
        self.rows = list(range(context.prompt_ids.shape[0]))
        self.model = model_over_cache(context, model)

    def begin(self, sequences: Sequences, steps: int) -> bool:
        """Behind the accepted tokens of these rows, at most `steps` steps; whether there are new ones, which had to be
        read."""
        read = self.model.follow(self.rows, sequences)
        self.rows = list(sequences.rows)
        self._ids = with_room(sequences, steps)
        self._lengths = list(sequences.lengths)
        self._last: Tensor | None = None
        return read

    def step(self) -> tuple[Tensor, Tensor]:
        """One more place: the candidates [B, k], the one that is gone on from first, and what is said of each."""
        context = self.context
        if self._last is None:
            logits = self.model.catch_up(self._ids, self._lengths)
        else:
            write_tokens(self._ids, self._last, self._lengths)
            self._lengths = [n + 1 for n in self._lengths]
            logits = self.model.feed(self._ids, self._lengths, self._last)
        tokens, chances = context.pick.likeliest(self._ids, self._lengths, self.rows, logits, self.candidates)
        self._last = tokens[:, 0].clone()
        return tokens, self.said(logits, tokens, chances)

    def said(self, logits: Tensor, tokens: Tensor, chances: Tensor) -> Tensor:
        """The estimates [B, k] of the candidates [B, k], of which the draft gives these chances."""
        return chances

    def observe(self, verdict: Verdict, drafted: Sequence[Sequence[int]]) -> None:
        """Keep in the cache what was fed and is part of the text now.

        Args:
            drafted: [B] the tokens that each row went on from.
        """
        if verdict.rows != self.rows:
            return
        kept = []
        for mine, text in zip(drafted, verdict.tokens, strict=True):
            same = [a == b for a, b in zip(mine, text[:-1], strict=False)]
            kept.append(same.index(False) if False in same else len(same))
        self.model.accept(kept, verdict.stopped)
