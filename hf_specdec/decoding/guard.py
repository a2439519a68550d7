"""A drafter can only cost time: one that raises, stalls or answers nonsense is dropped, the target goes on alone."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..drafters.base import Drafter
from ..errors import warn
from ..protocol import Draft, DraftContext, DraftSession, Sequences, Verdict

T = TypeVar("T")


class GuardedSession:
    """A `DraftSession` that never raises; one that is late is dropped."""

    def __init__(self, drafter: Drafter, context: DraftContext) -> None:
        self.name = type(drafter).__name__
        self.session: DraftSession | None = None
        self.context = context
        self.q_is_known = False
        self.session = self._guard(lambda: drafter.start(context))

    def draft(self, sequences: Sequences, budget: list[int]) -> Draft:
        """At most `budget` tokens per row; an empty draft where there is nothing to be had."""
        session = self.session
        began = time.perf_counter()
        if session is None or not any(budget):
            return self._empty(sequences)
        self._guard(lambda: session.start_draft(sequences, budget))
        while self.session is not None and not self._guard(session.poll):
            if time.perf_counter() - began > session.patience:
                break
            time.sleep(1e-4)
        if self.session is not None and time.perf_counter() - began > session.patience:
            self.drop(f"a draft took longer than {session.patience} seconds")
        if self.session is None:
            return self._empty(sequences)
        draft = self._guard(lambda: _checked(session.take(), sequences, budget))
        if draft is None or not self._answers_for_q(draft):
            return self._empty(sequences)
        return draft

    def _answers_for_q(self, draft: Draft) -> bool:
        """Asked once, before any test: a rejection without the rest of q could not be made up for."""
        if not self.q_is_known and draft.token_probs is not None and any(draft.lengths):
            row = next(b for b, k in enumerate(draft.lengths) if k)
            self.q_is_known = self.residual(row, 0) is not None
            return self.q_is_known
        return True

    def residual(self, row: int, node: int) -> Tensor | None:
        """q [V] at a node, or None where the drafter cannot say."""
        session = self.session
        if session is None:
            return None
        return self._guard(lambda: self._whole_row(session.residual(row, node)))

    def _whole_row(self, q: Tensor) -> Tensor:
        if q.shape != (self.context.vocab_size,):
            raise ValueError(f"q has shape {tuple(q.shape)}, the target has {self.context.vocab_size} tokens")
        return q.to(self.context.device, torch.float32)

    def observe(self, verdict: Verdict) -> None:
        session = self.session
        if session is not None:
            self._guard(lambda: session.observe(verdict))

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""
        if self.session is not None:
            warn(f"{self.name} was dropped: {reason}. The target finishes the text alone.")
        session, self.session = self.session, None
        if session is not None:
            self._close(session)

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self._close(session)

    def _close(self, session: DraftSession) -> None:
        try:
            session.close()
        except Exception as error:
            warn(f"{self.name} could not be closed: {error!r}")

    def _guard(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:
            reason = f"it raised {error!r}"
            if self.session is None:  # while it was being started
                warn(f"{self.name} was dropped: {reason}. The target finishes the text alone.")
            self.drop(reason)
            return None

    def _empty(self, sequences: Sequences) -> Draft:
        return Draft.from_lists([[]] * len(sequences.rows), self.context.device)


def _checked(draft: Draft, sequences: Sequences, budget: list[int]) -> Draft:
    """Shapes, cut to what was asked for; the values are checked with the verification's own transfer."""
    rows = len(sequences.rows)
    if draft.tokens.ndim != 2 or draft.tokens.shape[0] != rows or len(draft.lengths) != rows:
        raise ValueError(f"a draft for {rows} rows came with tokens of shape {tuple(draft.tokens.shape)}")
    if draft.sources and len(draft.sources) != rows:
        raise ValueError(f"a draft for {rows} rows came with {len(draft.sources)} sources")
    width = draft.tokens.shape[1]
    device = sequences.ids.device
    for name, values in (("parents", draft.parents), ("token_probs", draft.token_probs)):
        if values is not None and values.shape != draft.tokens.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, tokens {tuple(draft.tokens.shape)}")
    for name, values in (("tokens", draft.tokens), ("parents", draft.parents)):
        if values is not None and values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be integers, got {values.dtype}")
    if not all(0 <= length <= width for length in draft.lengths):
        raise ValueError(f"lengths {draft.lengths} do not fit {width} drafted tokens")
    lengths = list(draft.lengths)
    parents = draft.parents
    if parents is not None:
        for row in parents.tolist():
            if not all(-1 <= parent < i for i, parent in enumerate(row)):
                raise ValueError("every parent must come before its child")
        for b, depths in enumerate(draft.depths()):
            within = [depth <= budget[b] for depth in depths[: lengths[b]]]
            lengths[b] = within.index(False) if False in within else lengths[b]
        parents = parents.to(device, torch.long)
    else:
        lengths = [min(length, most) for length, most in zip(lengths, budget, strict=True)]
    probs = None if draft.token_probs is None else draft.token_probs.to(device)
    width = max(lengths)
    return Draft(
        draft.tokens[:, :width].to(device, torch.long),
        lengths,
        None if parents is None else parents[:, :width],
        None if probs is None else probs[:, :width],
        draft.sources,
    )


def as_chain(draft: Draft) -> Draft:
    """The first branch of a tree, where trees cannot be verified.

    Lossless: of siblings drawn independently from one q, the first is a draw from q by itself.
    """
    if draft.parents is None:
        return draft
    if draft.tokens.shape[1] == 0:
        return Draft(draft.tokens, draft.lengths, sources=draft.sources)
    branches = []
    for row, length in zip(draft.parents.tolist(), draft.lengths, strict=True):
        branch: list[int] = []
        for node in range(length):
            if row[node] == (branch[-1] if branch else -1):
                branch.append(node)
        branches.append(branch)
    width = max(map(len, branches), default=0)
    index = draft.tokens.new_tensor([branch + [0] * (width - len(branch)) for branch in branches]).view(-1, width)
    probs = None if draft.token_probs is None else draft.token_probs.gather(1, index)
    return Draft(draft.tokens.gather(1, index), [len(branch) for branch in branches], None, probs, draft.sources)
