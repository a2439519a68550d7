"""What a session hands over is held to its form before anything is done with it."""

import torch
from torch import Tensor

from ..protocol import Draft, DraftSession
from ..transfer import moved

MOST_NODES = 4096
"""nodes of one draft, over all rows"""


def checked(
    session: DraftSession, draft: Draft, rows: int, budget: list[int], device: torch.device, vocab: int
) -> Draft:
    """Shapes, cut to what was asked for; the values are checked with the verification's own transfer.

    Raises:
        ValueError, TypeError: it says what is wrong with the draft.
    """
    tokens = draft.tokens
    if tokens.ndim != 2 or tokens.shape[0] != rows or len(draft.lengths) != rows:
        raise ValueError(f"a draft for {rows} rows came with tokens of shape {tuple(tokens.shape)}")
    width = tokens.shape[1]
    if draft.sources and (len(draft.sources) != rows or not all(isinstance(name, str) for name in draft.sources)):
        raise ValueError(f"a draft for {rows} rows came with sources {draft.sources!r}; one string per row is expected")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    lengths = [int(length) for length in draft.lengths]
    if not all(0 <= length <= width for length in lengths):
        raise ValueError(f"lengths {lengths} do not fit {width} drafted tokens")
    parents = None if draft.parents is None else _checked_parents(draft.parents, rows, width)
    if parents is None:
        lengths = [min(length, most) for length, most in zip(lengths, budget, strict=True)]
    else:
        for b, depths in enumerate(Draft(tokens, lengths, parents).depths()):
            within = [depth <= budget[b] for depth in depths[: lengths[b]]]
            lengths[b] = within.index(False) if False in within else lengths[b]
    width = max(lengths)
    probs, q = _checked_probs(session, draft, lengths, width, vocab)
    return Draft(
        tokens=moved(tokens[:, :width], device).long(),
        lengths=lengths,
        parents=None if parents is None else [row[:width] for row in parents],
        token_probs=None if probs is None else moved(probs, device).float(),
        q=None if q is None else moved(q, device).float(),
        sources=list(draft.sources),
    )


def _checked_parents(parents: object, rows: int, width: int) -> list[list[int]]:
    """[B][K] on the host; a tensor is taken, too."""
    lists = parents.tolist() if isinstance(parents, Tensor) else [list(row) for row in parents]  # type: ignore[attr-defined]
    if len(lists) != rows or any(len(row) != width for row in lists):
        raise ValueError(f"parents has rows of {[len(row) for row in lists]} nodes, tokens {rows} rows of {width}")
    if not all(type(parent) is int for row in lists for parent in row):
        raise ValueError("parents must be integers")
    if not all(-1 <= parent < i for row in lists for i, parent in enumerate(row)):
        raise ValueError("every parent must come before its child")
    return lists


def _checked_probs(
    session: DraftSession, draft: Draft, lengths: list[int], width: int, vocab: int
) -> tuple[Tensor | None, Tensor | None]:
    """q of the drafted tokens and whole, of `width` nodes: a rejection without the rest of q could not be made up for,
    so it is asked for before any test."""
    probs, q = draft.token_probs, draft.q
    if q is None and probs is None:
        return None, None
    for name, values, shape in (("token_probs", probs, draft.tokens.shape), ("q", q, (*draft.tokens.shape, vocab))):
        if values is not None and values.shape != shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, and should have {tuple(shape)}")
        if values is not None and not values.is_floating_point():
            raise ValueError(f"{name} must be floating point numbers, got {values.dtype}")
    if q is None:
        assert probs is not None
        q = probs.new_zeros(*probs.shape[:1], width, vocab, dtype=torch.float32)
        for b, length in enumerate(lengths):
            for node in range(length):
                row = session.q(b, node)
                if row.shape != (vocab,):
                    raise ValueError(f"q has shape {tuple(row.shape)}, the target has {vocab} tokens")
                q[b, node] = row.to(q, non_blocking=True)
    q = q[:, :width]
    if probs is None:
        return q.gather(2, moved(draft.tokens[:, :width], q.device).clamp(0, vocab - 1)[..., None])[..., 0], q
    return probs[:, :width], q
