"""Record what a drafter proposes and what becomes of it, by wrapping it; the engine sees an ordinary drafter."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.base import Draft, DraftContext, Drafter, DraftSession, Sequences, Verdict


@dataclass
class Round:
    """One draft and its verification, of one row."""

    draft: list[int]
    """drafted tokens; of a tree, the accepted path only"""
    probs: list[float] | None
    """q of each drafted token; None for a point mass"""
    drafted: int
    """tokens that were tested"""
    accepted: int
    tokens: list[int]
    """what the round added to the text"""
    width: int
    """tokens per row in the verification"""
    draft_seconds: float
    verify_seconds: float
    source: str | None
    """where the draft came from, for drafters that choose"""

    @property
    def rejected(self) -> int | None:
        """The drafted token that the target put its own in place of, if one was (none where the text ended before)."""
        replaced = self.accepted < min(self.drafted, len(self.draft), len(self.tokens))
        return self.draft[self.accepted] if replaced else None

    @property
    def wasted_seconds(self) -> float:
        """The part of the drafting time that went into tokens thrown away."""
        return self.draft_seconds * (self.drafted - self.accepted) / self.drafted if self.drafted else 0.0


class RecordingDrafter(Drafter):
    """Delegates to `inner` and keeps the rounds of row 0 of the last `generate` call in `rounds`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.config = inner.config
        self.last_stats = None
        self.proposes_trees = inner.proposes_trees
        self.rounds: list[Round] = []

    def start(self, context: DraftContext) -> DraftSession:
        self.rounds.clear()
        return RecordingSession(self.inner.start(context), self.rounds)

    def check_target(self, target: PreTrainedModel) -> None:
        self.inner.check_target(target)

    def takes_ragged(self) -> bool:
        return self.inner.takes_ragged()

    def runner(self, target: PreTrainedModel) -> AbstractContextManager[Any] | None:
        return self.inner.runner(target)


class RecordingSession(DraftSession):
    """Delegates to `inner`; a round is complete when its verdict comes."""

    def __init__(self, inner: DraftSession, rounds: list[Round]) -> None:
        super().__init__(inner.context)
        self.inner, self.rounds, self.patience = inner, rounds, inner.patience
        self._began = self._draft_seconds = 0.0
        self._taken: Draft | None = None

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        return self.inner.propose(sequences, budget)

    def start_draft(self, sequences: Sequences, budget: list[int]) -> None:
        self._began = time.perf_counter()
        self.inner.start_draft(sequences, budget)

    def poll(self) -> bool:
        return self.inner.poll()

    def take(self) -> Draft:
        self._taken = self.inner.take()
        self._draft_seconds = time.perf_counter() - self._began
        return self._taken

    def cancel(self, rows: list[int]) -> None:
        self.inner.cancel(rows)

    def residual(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        return self.inner.residual(row, node, tokens)

    def observe(self, verdict: Verdict) -> None:
        draft, self._taken = self._taken, None
        if draft is not None and 0 in verdict.rows:
            self.rounds.append(_round(draft, verdict, verdict.rows.index(0), self._draft_seconds))
        self.inner.observe(verdict)

    def close(self) -> None:
        self.inner.close()


def _round(draft: Draft, verdict: Verdict, row: int, draft_seconds: float) -> Round:
    accepted, tokens = verdict.accepted[row], verdict.tokens[row]
    length = draft.lengths[row]
    chain = draft.parents is None
    return Round(
        draft=draft.tokens[row, :length].tolist() if chain else tokens[:accepted],
        probs=draft.token_probs[row, :length].tolist() if chain and draft.token_probs is not None else None,
        drafted=verdict.drafted[row],
        accepted=accepted,
        tokens=tokens,
        width=verdict.width,
        draft_seconds=draft_seconds,
        verify_seconds=verdict.seconds,
        source=draft.sources[row] if draft.sources else None,
    )
