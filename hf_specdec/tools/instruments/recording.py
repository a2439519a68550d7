"""Record what a drafter proposes and what becomes of it. The engine sees an ordinary drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...drafters.base import Drafter
from ...protocol import Draft, DraftContext, Verdict
from ...schedule import Guarded, Schedule
from ...session import DraftSession


@dataclass
class Round:
    """One draft and its verification, of one row."""

    draft: list[int]
    """drafted tokens; of a tree, the accepted path and the first branch below its end"""
    drafted: int
    """tokens that were tested"""
    accepted: int
    tokens: list[int]
    """what the round added to the text"""
    draft_seconds: float
    """in which the target waited"""

    @property
    def rejected(self) -> int | None:
        """The drafted token that the target replaced by its own; None where it replaced none, or the text ended."""
        replaced = self.accepted < min(self.drafted, len(self.draft), len(self.tokens))
        return self.draft[self.accepted] if replaced else None

    @property
    def wasted_seconds(self) -> float:
        """The part of the drafting time that went into tokens thrown away."""
        return self.draft_seconds * (self.drafted - self.accepted) / self.drafted if self.drafted else 0.0


class Listening(Drafter):
    """Passes everything on to `inner`. Sessions are the inner drafter's own, so any schedule works as without it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.config, self.last_stats = inner, inner.config, None
        self.proposes_trees, self.brings_runner = inner.proposes_trees, inner.brings_runner
        self.recordable, self.because = inner.recordable, inner.because

    def check_target(self, target: PreTrainedModel) -> None:
        self.inner.check_target(target)

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return self.inner.why_not(prompt_ids, source)

    def takes_ragged(self) -> bool:
        return self.inner.takes_ragged()

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule | None:
        return self.inner.schedule(session, context)


class RecordingDrafter(Listening):
    """Keeps the rounds of row 0 of the last `generate` call in `rounds`."""

    def __init__(self, inner: Drafter, told: Callable[[Round], None] | None = None) -> None:
        """
        Args:
            told: called with each round when it is over.
        """
        super().__init__(inner)
        self.told = told
        self.rounds: list[Round] = []

    def start(self, context: DraftContext) -> DraftSession:
        """Only the session's verdicts are read: a round is complete when its verdict comes."""
        self.rounds.clear()
        session = self.inner.start(context)
        observe = session.observe

        def seen(verdict: Verdict) -> None:
            if 0 in verdict.rows and verdict.draft is not None:
                self.rounds.append(_round(verdict.draft, verdict, verdict.rows.index(0)))
                if self.told is not None:
                    self.told(self.rounds[-1])
            observe(verdict)

        session.observe = seen  # type: ignore[method-assign]
        return session


def _round(draft: Draft, verdict: Verdict, row: int) -> Round:
    accepted, tokens = verdict.accepted[row], verdict.tokens[row]
    drafted = _one_below_the_other(draft, row, tokens[:accepted])
    return Round(drafted, verdict.drafted[row], accepted, tokens, verdict.draft_seconds)


def _one_below_the_other(draft: Draft, row: int, kept: list[int]) -> list[int]:
    tokens = draft.tokens[row, : draft.lengths[row]].tolist()
    if draft.parents is None:
        return tokens
    parents = draft.parents[row]
    line, ends = list(kept), {-1}
    for token in kept:
        ends = {i for i, other in enumerate(tokens) if other == token and parents[i] in ends}
    while (first := next((i for i in range(len(tokens)) if parents[i] in ends), None)) is not None:
        line, ends = [*line, tokens[first]], {first}
    return line
