"""Attention that sums in one order, wherever in a chain or a tree a token stands.

The keys of a branch lie among those of other branches, so a kernel that walks over slots would meet a token's own text
in other places than in a chain, and round otherwise. Here each token gathers the last keys of its own text by their
distance from it; all before them lie in the same places in any text. Both parts are merged by the logarithms of their
sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .splits import attended, merged, split_mask, splits_of

NEAR = 32
"""keys that a token gathers, and so the most tokens of a tree: what lies farther back is no part of it"""
GATHERS: tuple[str, ...] = ("cuda",)
"""kinds of devices on which this is done: on a CPU it costs a seventh of a forward, and trees gain a ninth"""


def near_slots(ends: Tensor, seen: Tensor | None, depth: Tensor) -> Tensor:
    """[B, T, NEAR] where the last keys of each new token's text are, by distance; negative before it begins.

    Args:
        ends, seen, depth: as of `masks.allowed_slots`.
    """
    first, distance = ends[:, None, None], torch.arange(NEAR, device=ends.device)
    slots = first + depth[:, :, None] - distance
    if seen is None:
        return slots
    above = (depth[:, :, None] - depth[:, None]).masked_fill(~seen, NEAR)  # what it does not see is cut off
    rows, width = len(ends), depth.shape[1]
    places = (first + torch.arange(width, device=ends.device)).expand(rows, width, -1)
    slots = pad(slots.expand(rows, -1, -1), (0, 1)).scatter(2, above.expand(rows, -1, -1), places)
    return slots[:, :, :NEAR]


def with_near(allowed: Tensor, distance: Tensor, slots: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """What `masks.allowed_slots` gives, without the last keys, which follow behind all slots: [B, T, S + NEAR].

    Args:
        slots: as `near_slots` gives them.
        visible: [B, any] which of the first slots count.
    """
    inside = slots.clamp(0, visible.shape[1] - 1)
    near = (slots >= 0) & visible.gather(1, inside.flatten(1)).view_as(slots)
    steps = torch.arange(NEAR, device=slots.device).expand_as(slots)
    return torch.cat([allowed & (distance >= NEAR), near], 2), torch.cat([distance.expand_as(allowed), steps], 2)


class Parts(NamedTuple):
    """What a forward's layers look at, made once for all of them."""

    places: Tensor
    """[B · H · T · NEAR] where near keys are among the slots of all heads"""
    of_near: Tensor
    """additive, [B · H, T, groups, NEAR]"""
    of_far: Tensor
    """as `split_mask` gives it, [B · H, splits, T · groups, S / splits]"""

    @classmethod
    def of(cls, mask: Tensor, groups: int, heads: int, keys: int, splits: int, slots: Tensor) -> "Parts":
        """
        Args:
            mask: additive, [B, 1, T, S + NEAR].
            groups: query heads that share one of H heads of keys.
            keys: S.
            slots: as `near_slots` gives them.
        """
        rows, width = len(slots), slots.shape[1]
        first = torch.arange(rows * heads, device=slots.device).view(rows, heads, 1, 1) * keys
        places = (first + slots.clamp_min(0)[:, None]).flatten()
        near = mask[..., keys:].reshape(rows, 1, width, 1, NEAR).clamp_min(torch.finfo(mask.dtype).min / 2)
        near = near.expand(-1, heads, -1, groups, -1).flatten(0, 1)
        far = mask[..., :keys].repeat_interleave(groups, 2)
        return cls(places, near, split_mask(far, rows, heads, splits))


def attend_near(query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float | None = None) -> Tensor:
    """[B, H, T · groups, size], what `scaled_dot_product_attention` gives, in float32 at least: not rounded yet.

    Args:
        query: [B, H, T · groups, size].
        key, value: [B, H, S, size].
        scale: of the products; None for the usual one.
    """
    (rows, heads), width = key.shape[:2], parts.of_near.shape[1]
    by_token = query.flatten(0, 1).unflatten(1, (width, -1))
    keys, values = (
        states.reshape(-1, states.shape[3]).index_select(0, parts.places).view(rows * heads, width, NEAR, -1)
        for states in (key, value)
    )
    near, near_logs = attended(by_token, keys, values, parts.of_near, scale)
    splits, logs = splits_of(query, key, value, parts.of_far, scale)
    far, far_logs = (splits[:, 0], logs[:, 0]) if logs.shape[1] == 1 else (merged(splits, logs), logs.logsumexp(1))
    # In float64, whose last place does not matter: a vector's rest, computed one by one, is rounded otherwise.
    near_logs = near_logs[:, :, : by_token.shape[2]].flatten(1)
    share = (near_logs.double() - far_logs).sigmoid()[..., None]
    seen = near.flatten(1, 2) * share.to(far.dtype) + far * (1 - share).to(far.dtype)
    return seen.unflatten(0, (rows, heads))
