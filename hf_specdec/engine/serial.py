"""The serial schedule (Leviathan et al. 2023, Algorithm 1): draft, then verify."""

import torch

from ..protocol import Draft, Verdict
from ..schedule import Correct, Guarded, Round
from ..transfer import to_device


class Serial:
    """What the session drafts is what the target is fed and what is judged."""

    correct: Correct | None = None

    def __init__(self, session: Guarded) -> None:
        self.session = session

    def feed(self, round: Round) -> Draft:
        return self.session.draft(round.sequences, round.room)

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        return fed, None

    def settle(self, verdict: Verdict) -> None:
        """The next round begins anew."""


def in_step(draft: Draft, passive: list[bool], pad_token_id: int) -> Draft:
    """A draft of chains for rows that advance together: as long as the shortest, padding for rows that are finished."""
    width = min(length for length, out in zip(draft.lengths, passive, strict=True) if not out)
    if width == draft.tokens.shape[1] and not any(passive):
        return draft
    tokens = draft.tokens[:, :width]
    if any(passive):
        tokens = tokens.masked_fill(to_device(passive, tokens.device, torch.bool)[:, None], pad_token_id)
    probs = None if draft.token_probs is None else draft.token_probs[:, :width]
    q = None if draft.q is None else draft.q[:, :width]
    return Draft(tokens, [0 if out else width for out in passive], None, probs, q, draft.sources)
