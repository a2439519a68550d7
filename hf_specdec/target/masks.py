"""Who sees what in a batch of rows of different lengths: 4-D masks, for chains and for trees."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from ..transfer import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tree_shape(trees: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which new tokens each one of a tree sees, and how deep it lies.

    Args:
        trees: [1 or B][T] index of each token's parent among the T, -1 for the first.

    Returns:
        seen [1 or B, T, T], itself and all above; depth [1 or B, T], below the first.
    """
    seen = [_ancestors(tree) for tree in trees]
    depth = [[sum(row) - 1 for row in rows] for rows in seen]
    return to_device(seen, device, torch.bool), to_device(depth, device)


def _ancestors(tree: Sequence[int]) -> list[list[bool]]:
    rows: list[list[bool]] = []
    for node, parent in enumerate(tree):  # parents come before their children
        row = list(rows[parent]) if parent >= 0 else [False] * len(tree)
        row[node] = True
        rows.append(row)
    return rows


def allowed_slots(ends: Tensor, end: int, seen: Tensor | None, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots each new token may look at, and how far back each lies.

    Args:
        ends: [B] slots that count in each row; the new tokens stand in those after them.
        end: slots in all.
        seen: [1 or B, T, T] which new tokens each new one sees; None in a chain.
        depth: [1 or B, T] how far each new token is below the first.

    Returns:
        allowed and distance, [B, T, end]; distances are in positions, negative for what comes after the token.
    """
    offset = torch.arange(end, device=ends.device) - ends[:, None, None]
    distance = depth[:, :, None] - offset
    if seen is None:
        return distance >= 0, distance
    # A tree: new tokens count by depth, not by slot, and see what lies above them only.
    rows, width = len(ends), seen.shape[2]
    new = offset.clamp(0, width - 1)
    is_new, new = new == offset, new.expand(rows, depth.shape[1], -1)
    depths = depth[:, None].expand(rows, depth.shape[1], -1).gather(2, new)
    distance = torch.where(is_new, depth[:, :, None] - depths, distance)
    return (offset < 0) | is_new & seen.expand(rows, -1, -1).gather(2, new), distance


def as_bias(
    allowed: Tensor, distance: Tensor, windows: dict[str, int | None], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive 4-D masks [B, 1, T, end], one per kind of layer where a model has several."""
    masks = {}
    for kind, window in windows.items():
        inside = allowed if window is None else allowed & (distance < window)
        bias = torch.zeros(inside.shape, dtype=dtype, device=inside.device)
        masks[kind] = bias.masked_fill_(~inside, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_windows(model: "PreTrainedModel") -> dict[str, int | None]:
    """The attention window of each kind of layer the model's masks are keyed by (one key: the mask is a tensor).

    Raises:
        TypeError: there are layers of another kind than attention.
    """
    # Not from a call's cache: one that the user made without a config knows of no windows.
    layers = DynamicCache(config=model.config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"]
    windows = windows or [None] * len(kinds)
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise TypeError(f"no masks for layers of type {', '.join(sorted(unknown))}")
    if len(set(kinds)) == 1:
        return {kinds[0]: windows[0]}
    return {kind: windows[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
