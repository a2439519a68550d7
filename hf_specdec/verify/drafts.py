"""Drafts as the target and the judge read them, and the way to the host."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..protocol import Draft
from ..transfer import to_device, to_host

NO_VALUES = torch.empty(0, dtype=torch.long, device="cpu")
"""nothing to be told of, on whatever device"""


def is_sound(draft: Draft, vocab: int) -> Tensor:
    """Whether all ids are in the vocabulary and all q are probabilities: a boolean on the draft's device, or no value
    where nothing was drafted, or is known to be sound."""
    if not draft.tokens.shape[1] or draft.known is not None:
        return NO_VALUES
    fine = (draft.tokens >= 0) & (draft.tokens < vocab)
    if draft.token_probs is not None:
        fine &= (draft.token_probs > 0) & (draft.token_probs <= 1 + 1e-4)  # false for NaN
        if draft.q is not None:  # what a rejection is made up for with must be what was drawn from
            q = draft.q.gather(2, draft.tokens.clamp(0, vocab - 1)[..., None])[..., 0]
            fine &= (q - draft.token_probs).abs() <= 1e-3 * draft.token_probs + 1e-6
            fine &= (draft.q.sum(-1) - 1).abs() <= 1e-2
    width = draft.tokens.shape[1]
    if min(draft.lengths, default=width) < width:
        lengths = to_device(draft.lengths, fine.device)[:, None]
        fine |= torch.arange(width, device=fine.device) >= lengths
    return fine.all()


def parents_of(draft: Draft) -> list[list[int]] | None:
    """[B][K + 1] the parent of each token that is fed, of which the first is the last accepted one; None in a chain."""
    return None if draft.parents is None else [[-1, *[parent + 1 for parent in row]] for row in draft.parents]


def as_tree(draft: Draft) -> Draft:
    """A chain, written as a tree."""
    if draft.parents is not None:
        return draft
    parents = [list(range(-1, draft.tokens.shape[1] - 1))] * len(draft.lengths)
    return replace(draft, parents=parents)


def to_host_together(*tensors: Tensor, meanwhile: Callable[[], object] | None = None) -> list[list[Any]]:
    """The values of several tensors, each in a flat list, in one transfer of those that have any.

    Args:
        meanwhile: as in `to_host`.
    """
    full = [tensor.flatten() for tensor in tensors if tensor.numel()]
    kind = torch.float64 if any(map(torch.is_floating_point, full)) else torch.long
    told, start, values = to_host(torch.cat([tensor.to(kind) for tensor in full]), meanwhile), 0, []
    for tensor in tensors:
        mine = told[start : start + tensor.numel()]
        values.append(mine if tensor.is_floating_point() else list(map(int, mine)))
        start += tensor.numel()
    return values


def padded(texts: list[list[int]], device: torch.device) -> Tensor:
    """Rows of uneven lengths as a tensor [B, longest]."""
    width = max(map(len, texts), default=0)
    return to_device([text + [0] * (width - len(text)) for text in texts], device)
