"""The serial schedule (Leviathan et al. 2023, Algorithm 1): draft, then verify."""

import torch

from ..protocol import Correct, Draft, Guarded, Round, Verdict
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
    tokens = draft.tokens[:, :width]
    if any(passive):
        tokens = tokens.masked_fill(to_device(passive, tokens.device, torch.bool)[:, None], pad_token_id)
    probs = None if draft.token_probs is None else draft.token_probs[:, :width]
    q = None if draft.q is None else draft.q[:, :width]
    return Draft(tokens, [0 if out else width for out in passive], None, probs, q, draft.sources)


def as_chain(draft: Draft) -> Draft:
    """The first branch of a tree, where trees cannot be verified.

    Lossless: of siblings drawn independently from one q, the first is a draw from q by itself.
    """
    if draft.parents is None:
        return draft
    if draft.tokens.shape[1] == 0:
        return Draft(draft.tokens, draft.lengths, sources=draft.sources)
    branches = []
    for row, length in zip(draft.parents, draft.lengths, strict=True):
        branch: list[int] = []
        for node in range(length):
            if row[node] == (branch[-1] if branch else -1):
                branch.append(node)
        branches.append(branch)
    width = max(map(len, branches), default=0)
    index = to_device([branch + [0] * (width - len(branch)) for branch in branches], draft.tokens.device)
    index = index.view(-1, width)
    probs = None if draft.token_probs is None else draft.token_probs.gather(1, index)
    q = None if draft.q is None else draft.q.gather(1, index[..., None].expand(-1, -1, draft.q.shape[2]))
    return Draft(draft.tokens.gather(1, index), [len(branch) for branch in branches], None, probs, q, draft.sources)
