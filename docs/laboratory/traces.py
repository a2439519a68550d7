"""Record what the budget had before it in each round, and replay its decision: was it told the truth?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_specdec.budget import Advance, most_per_second
from hf_specdec.clock import now
from hf_specdec.drafters import Draft, DraftContext, Drafter, DraftSession, Sequences, Verdict
from hf_specdec.tools.instruments.recording import Listening

BINS = 10


@dataclass
class Traced:
    """A round: what was offered, and what became of it."""

    round_seconds: Callable[[int], float]
    """of the round by the width of its forward, as it was known then"""
    most: int
    """nodes of a row that might be verified, by what was known"""
    rows: list[Sequence[float]]
    """chances of the nodes that were offered to each row with room for them, the likeliest first"""
    advance: Advance
    spent: float
    """seconds of drafting"""
    began: float
    """by `clock.now`"""
    verified: int = 0
    """nodes of a row at most"""
    tokens: int = 0
    """that the round added to the text, over all rows"""
    seconds: float = 0.0
    """until the next round began"""
    fates: list[tuple[float, bool]] = field(default_factory=list)
    """of the nodes that the text has tested, verified or not, and of all below those that were wrong: the chance to
    survive, and whether it did"""

    def replayed(self) -> tuple[int, float, float]:
        """Nodes of a row that the budget verifies, the tokens that it expects, and the seconds."""
        count, _ = most_per_second(self.rows, self.round_seconds, self.spent, self.advance, self.most)
        return count, sum(1 + sum(row[:count]) for row in self.rows), self.round_seconds(1 + count) + self.spent


class TracingDrafter(Listening):
    """Keeps the rounds of all calls in which the budget decided."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.rounds: list[Traced] = []

    def start(self, context: DraftContext) -> DraftSession:
        session = self.inner.start(context)
        _Listener(session, self.rounds)
        return session


class _Listener:
    """Stands in for a session's methods."""

    def __init__(self, session: DraftSession, rounds: list[Traced]) -> None:
        self.session, self.rounds = session, rounds
        self.begin, self.give, self.tell = session.start_draft, session.take, session.observe
        session.start_draft, session.take = self.start_draft, self.take  # type: ignore[method-assign]
        session.observe = self.observe  # type: ignore[method-assign]
        self.room: list[int] = []
        self.began = 0.0
        self.offered: tuple[Draft, Traced] | None = None
        self.last: Traced | None = None
        """the round before, where the budget decided"""

    def start_draft(self, sequences: Sequences, room: list[int]) -> None:
        self.began, self.room = now(), list(room)
        if self.last is not None:
            self.last.seconds = self.began - self.last.began
        self.begin(sequences, room)

    def take(self) -> Draft:
        draft = self.give()
        context, batch = self.session.context, len(self.room)
        cost = context.cost
        if draft.survival is not None and cost.tried(batch) is None:
            rows = [row for row, most in zip(draft.survival, self.room, strict=True) if most]
            spent, known = now() - self.began, (cost.round(batch), cost.most(batch))
            self.offered = draft, Traced(*known, rows, context.advance, spent, self.began)
        return draft

    def observe(self, verdict: Verdict) -> None:
        offered, self.offered, self.last = self.offered, None, None
        if offered is not None:
            draft, traced = offered
            traced.verified, traced.tokens = verdict.width - 1, sum(map(len, verdict.tokens))
            traced.seconds = now() - traced.began
            for b, text in enumerate(verdict.tokens):
                traced.fates += _fates(draft, b, text)
            self.rounds.append(traced)
            self.last = traced
        self.tell(verdict)


def _fates(draft: Draft, row: int, text: Sequence[int]) -> list[tuple[float, bool]]:
    """Chances of a row's nodes, and whether each survived, as far as the text says so."""
    assert draft.survival is not None
    parents = range(-1, draft.tokens.shape[1] - 1) if draft.parents is None else draft.parents[row]
    tokens = draft.tokens[row, : draft.lengths[row]].tolist()
    depth: list[int | None] = []
    """of the nodes that the text went through; -1 behind a wrong one, None behind the text's end"""
    fates = []
    for token, parent, chance in zip(tokens, parents, draft.survival[row], strict=False):
        above = 0 if parent < 0 else depth[parent]
        if above is None or above == len(text):
            depth.append(None)
            continue
        right = above >= 0 and text[above] == token
        depth.append(above + 1 if right else -1)
        fates.append((chance, right))
    return fates


def calibration_error(fates: Sequence[tuple[float, bool]]) -> tuple[float, list[tuple[float, float, int]]]:
    """The expected calibration error (ECE): how far chances are from what came true, over equal bins.

    Returns:
        the error, and per bin that is not empty the mean chance, the share that came true, and how many there were.
    """
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for chance, right in fates:
        bins[min(int(BINS * chance), BINS - 1)].append((chance, right))
    found = [
        (sum(chance for chance, _ in one) / len(one), sum(right for _, right in one) / len(one), len(one))
        for one in bins
        if one
    ]
    return sum(n * abs(said - true) for said, true, n in found) / max(1, len(fates)), found
