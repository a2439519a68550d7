"""What a session drafts is brought into the form in which the target is fed it.

Ids and probabilities themselves are checked where the verification reads them (`verify.drafts.is_sound`), so that a GPU
is waited for once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..budget import are_chains
from ..protocol import Draft, DraftContext
from ..transfer import moved, on_host, to_device, values_on_host
from .checks import Unfit, expect, tensor

UNSOUND = "it returned token ids or probabilities out of range, or a q that does not match them"
MOST_FED, LEAST_FED = 4096, 16
"""nodes of one draft that go to the target: over all rows, and in each row, however many those are"""

Ask = Callable[[int, int], Any]
"""(row, node) → q [V] of a drawn token, of which a draft says `token_probs` alone"""


def no_draft(rows: int, device: torch.device) -> Draft:
    """Nothing, for so many rows."""
    return Draft.from_lists([[]] * rows, device)


def checked_draft(draft: Draft, room: Sequence[int], vocab: int) -> Draft:
    """A draft in form. In each row it ends before the first node that is deeper than there is room for.

    Raises:
        Unfit, or whatever comes of reading something else than a draft.
    """
    expect(isinstance(draft, Draft), "a draft", "a Draft", draft)
    rows, sources = len(room), [str(name) for name in draft.sources]
    tokens = tensor("tokens", draft.tokens, (rows, None), integers=True)
    width, lengths = tokens.shape[1], [int(length) for length in draft.lengths]
    fine = len(lengths) == rows and all([0 <= length <= width for length in lengths])
    expect(fine, "lengths", f"{rows} numbers from 0 to {width}, the columns of tokens", lengths)
    parents = None if draft.parents is None else _parents(draft.parents, rows, width)
    for b, depths in enumerate(Draft(tokens, lengths, parents).depths()):
        lengths[b] = next((i for i in range(lengths[b]) if depths[i] > room[b]), lengths[b])
    expect(len(sources) in (0, rows), "sources", f"empty, or {rows} strings", sources)
    survival = None if draft.survival is None else [[float(chance) for chance in row] for row in draft.survival]
    if survival is not None:
        fine = len(survival) == rows and all([0 <= chance <= 1 for row in survival for chance in row])
        fine = fine and all([len(row) >= length for row, length in zip(survival, lengths, strict=True)])
        expect(fine, "survival", f"a chance from 0 to 1 for each of {lengths} nodes", survival)
    least = [int(count) for count in draft.least]
    expect(len(least) in (0, rows) and all([count >= 0 for count in least]), "least", f"{rows} numbers from 0", least)
    probs = None if draft.token_probs is None else tensor("token_probs", draft.token_probs, (rows, width))
    q = None if draft.q is None else tensor("q", draft.q, (rows, None, vocab))
    expect(q is None or (q.shape[1] <= width and probs is None) or q.shape[1] == width, "q", f"of {width} nodes", q)
    known = None if draft.known is None else _known(tokens, lengths, vocab)
    if known is not None:
        tokens = on_host(known).view(rows, width)
    return Draft(tokens, lengths, parents, probs, q, sources, survival, least, known)


def _known(tokens: Tensor, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Of tokens [B, K] on the host those that count, and 0 behind them: whatever was said of them, these are fed.

    Raises:
        Unfit: an id that the target does not have.
    """
    known = [
        [*row[:length], *[0] * (len(row) - length)] for row, length in zip(values_on_host(tokens), lengths, strict=True)
    ]
    fine = all([0 <= token < vocab for row in known for token in row])
    if not fine:
        raise Unfit(UNSOUND)
    return known


def _parents(parents: Any, rows: int, width: int) -> list[list[int]]:
    """[B][K] on the host; a tensor is taken, too."""
    lists = parents.tolist() if isinstance(parents, Tensor) else [list(row) for row in parents]
    fine = len(lists) == rows and all([len(row) == width for row in lists])
    fine = fine and all([type(parent) is int and -1 <= parent < i for row in lists for i, parent in enumerate(row)])
    expect(fine, "parents", f"{rows} rows of {width} integers, each -1 or an earlier node", lists)
    return lists


def fit(
    draft: Draft, most: Sequence[int], context: DraftContext, pads: Sequence[int | None], ask: Ask | None = None
) -> Draft:
    """A draft in form as the target is fed it: where its ids are, but for tokens that the host knows, a chain where
    trees are not welcome, and of equal lengths in lockstep.

    Args:
        most: [B] nodes of each row; the first ones.
        context: the engine's own.
        pads: [B] what rows that are finished are fed in lockstep; None for all others.
        ask: asked for q before any test, as a rejection could not be made up for without it.
    """
    draft = cut(draft, [min(pair) for pair in zip(draft.lengths, most, strict=True)])
    draft = with_q(draft, context.vocab_size, ask)
    if draft.known is None or draft.token_probs is not None:
        draft = on_device(draft, context.device)
    if draft.parents is not None and not context.trees:
        draft = _first_branches(draft)
    if context.lockstep and draft.parents is None:
        draft = _in_step(draft, pads)
    return draft if draft.known is None else replace(draft, known=values_on_host(draft.tokens))


def cut(draft: Draft, lengths: list[int]) -> Draft:
    """The first nodes of each row, and no columns beyond them."""
    width, parents = max(lengths), draft.parents
    if lengths == draft.lengths and width == draft.tokens.shape[1]:
        return draft
    if parents is not None:
        parents, drawn = [row[:width] for row in parents], draft.q is not None or draft.token_probs is not None
        if not drawn and are_chains([row[:length] for row, length in zip(parents, lengths, strict=True)]):
            parents = None  # of draws: how they are tested must not depend on what was drawn
    return replace(
        draft,
        tokens=draft.tokens[:, :width],
        lengths=lengths,
        parents=parents,
        survival=None,  # of no more use: it said where to cut
        token_probs=None if draft.token_probs is None else draft.token_probs[:, :width],
        q=None if draft.q is None else draft.q[:, :width],
    )


def on_device(draft: Draft, device: torch.device) -> Draft:
    """The draft where the target's ids are, in the types that are reckoned with. The host need not know it any more."""
    return replace(
        draft,
        known=None,
        tokens=moved(draft.tokens, device).long(),
        token_probs=None if draft.token_probs is None else moved(draft.token_probs, device).float(),
        q=None if draft.q is None else moved(draft.q, device).float(),
    )


def with_q(draft: Draft, vocab: int, ask: Ask | None = None) -> Draft:
    """The draft with q of its tokens, and q in whole."""
    probs, q = draft.token_probs, draft.q
    if q is None and probs is not None and ask is not None:
        q = probs.new_zeros(*probs.shape, vocab, dtype=torch.float32)
        for b, length in enumerate(draft.lengths):
            for node in range(length):
                q[b, node] = tensor("q", ask(b, node), (vocab,))
    if q is not None and (undrawn := draft.tokens[:, q.shape[1] :]).shape[1]:  # all their mass is on themselves
        known = moved(undrawn, q.device).long().clamp(0, vocab - 1)[..., None]
        q = torch.cat([q, q.new_zeros(*undrawn.shape, vocab).scatter_(2, known, 1.0)], 1)
    if probs is None and q is not None:
        probs = q.gather(2, moved(draft.tokens, q.device).long().clamp(0, vocab - 1)[..., None])[..., 0]
    return replace(draft, token_probs=probs, q=q)


def _first_branches(draft: Draft) -> Draft:
    """The first branch of each tree, where trees cannot be verified.

    Lossless: of siblings drawn independently from one q, the first is a draw from q by itself.
    """
    if draft.parents is None or draft.tokens.shape[1] == 0:
        return replace(draft, parents=None)
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
    lengths = [len(branch) for branch in branches]
    return replace(draft, tokens=draft.tokens.gather(1, index), lengths=lengths, parents=None, token_probs=probs, q=q)


def _in_step(draft: Draft, pads: Sequence[int | None]) -> Draft:
    """Chains for rows that advance together: as long as the shortest, padding for rows that are finished."""
    finished = [pad is not None for pad in pads]
    width = min(length for length, out in zip(draft.lengths, finished, strict=True) if not out)
    if width == draft.tokens.shape[1] and not any(finished):
        return draft
    tokens = draft.tokens[:, :width]
    if any(finished):
        pad = next(pad for pad in pads if pad is not None)
        tokens = tokens.masked_fill(to_device(finished, tokens.device, torch.bool)[:, None], pad)
    probs = None if draft.token_probs is None else draft.token_probs[:, :width]
    q = None if draft.q is None else draft.q[:, :width]
    return replace(draft, tokens=tokens, lengths=[0 if out else width for out in finished], token_probs=probs, q=q)
