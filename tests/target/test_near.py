"""Attention that sums by distance: the same attention, and the same bits wherever in a tree a token stands."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_specdec.target.masks import allowed_slots, as_bias, tree_shape
from hf_specdec.target.near import NEAR, Parts, attend_near, near_slots, with_near

SLOTS, HEADS, GROUPS, SIZE = 512, 2, 3, 64
ENDS = [400, 70, 3]
"""slots that count: of long texts, of those hardly longer than what is near, and of shorter ones"""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def drawn(width: int, seed: int) -> list[int]:
    """A tree's parents."""
    draw = random.Random(seed)
    return [-1, *(draw.randrange(max(0, node - 4), node) for node in range(1, width))]


def states(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values."""
    torch.manual_seed(width)
    query, keys, values = (
        torch.randn(len(ENDS), heads, slots, SIZE)
        for heads, slots in ((HEADS * GROUPS, width), (HEADS, SLOTS), (HEADS, SLOTS))
    )
    return 2 * query.to(dtype), keys.to(dtype), values.to(dtype)


def attended(
    query: Tensor, keys: Tensor, values: Tensor, tree: list[int] | None, window: int | None, splits: int
) -> tuple[Tensor, Tensor]:
    """[B, groups · heads, T, size] by distance, not rounded, and by slots; of rows that do not see their first two."""
    (rows, _, width, _), ends = query.shape, torch.tensor(ENDS)
    seen, depth = (None, torch.arange(width)[None]) if tree is None else tree_shape([tree], ends.device)
    allowed, distance = allowed_slots(ends, SLOTS, seen, depth)
    visible = torch.ones(rows, SLOTS, dtype=torch.bool)
    visible[:, :2] = False
    allowed &= visible[:, None]
    plain = as_bias(allowed, distance, {"": window}, query.dtype)
    slots = near_slots(ends, seen, depth)
    masks = as_bias(*with_near(allowed, distance, slots, visible), {"": window}, query.dtype)
    together = query.unflatten(1, (HEADS, GROUPS)).transpose(2, 3).flatten(2, 3)
    found = attend_near(together, keys, values, Parts.of(masks, GROUPS, HEADS, SLOTS, splits, slots), 0.1)
    whole = [each.repeat_interleave(GROUPS, 1) for each in (keys, values)]
    by_slots = scaled_dot_product_attention(query, *whole, attn_mask=plain, scale=0.1)
    return found.unflatten(2, (width, GROUPS)).transpose(2, 3).flatten(1, 2), by_slots


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_the_same_attention(dtype: torch.dtype, window: int | None) -> None:
    for width in (1, 8, NEAR):
        for tree in (None, drawn(width, 0), drawn(width, 1)):
            for splits in (1, 4):
                by_distance, by_slots = attended(*states(width, dtype), tree, window, splits)
                torch.testing.assert_close(by_distance.to(dtype), by_slots, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_branch_has_the_bits_of_a_chain(dtype: torch.dtype) -> None:
    """By slots it has not: that shows in float32, while what is rounded to bfloat16 hides most of it."""
    by_slots_differ = 0
    for width in (8, NEAR):
        for seed in range(4):
            tree, (query, keys, values) = drawn(width, seed), states(width, dtype)
            grown = attended(query, keys, values, tree, None, 1)
            for leaf in set(range(width)) - set(tree):
                path = [leaf]
                while tree[path[0]] >= 0:
                    path.insert(0, tree[path[0]])
                inside = slice(0, len(path))
                in_line = [query.clone(), keys.clone(), values.clone()]
                in_line[0][:, :, inside] = query[:, :, path]
                for row, end in enumerate(ENDS):
                    for chain, branch in zip(in_line[1:], (keys, values), strict=True):
                        chain[row, :, end : end + len(path)] = branch[row][:, [end + node for node in path]]
                alone = attended(*in_line, None, None, 1)
                assert torch.equal(alone[0][:, :, inside], grown[0][:, :, path])
                by_slots_differ += not torch.equal(alone[1][:, :, inside], grown[1][:, :, path])
    assert by_slots_differ or dtype != torch.float32
