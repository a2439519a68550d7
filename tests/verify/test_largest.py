"""The largest of many scores, found by blocks, are those that torch finds."""

import pytest
import torch

from hf_specdec.verify.largest import BLOCK, MOST, argmax, topk

LEAST = MOST * BLOCK
SIZES = [5, LEAST - 1, LEAST, LEAST + 1, LEAST + BLOCK - 1, 49152, 50257]


def scores(kind: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size))
    if kind == "equals":  # the largest stands in many places
        drawn = drawn.clamp(max=1)
    if kind == "forbidden":
        drawn[..., 2:-2] = -torch.inf
    if kind == "nothing":
        drawn[:] = -torch.inf
    if kind == "nan":
        drawn[..., size // 2] = torch.nan
        drawn[..., -1] = torch.nan
    return drawn.to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["any", "equals", "forbidden", "nothing", "nan"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_first_of_the_largest(kind: str, size: int, dtype: torch.dtype) -> None:
    given = scores(kind, size, dtype)
    wide = torch.nn.functional.pad(given, (0, 3))[..., :size]  # not contiguous
    assert torch.equal(argmax(given), given.argmax(-1))
    assert torch.equal(argmax(wide), given.argmax(-1))
    assert argmax(given[:0]).shape == (0, 2)


def test_what_single_precision_cannot_tell_apart_is_told_apart() -> None:
    given = torch.zeros(LEAST, dtype=torch.float64)
    given[7], given[-7] = 1.0, 1.0 + 1e-12
    assert argmax(given) == LEAST - 7
    assert topk(given, 2)[1].tolist() == [LEAST - 7, 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["any", "equals", "forbidden", "nothing", "nan"])
@pytest.mark.parametrize("count", [1, 4, MOST, MOST + 1])
def test_so_many_of_the_largest_are_found_once_each(kind: str, size: int, count: int) -> None:
    given = scores(kind, size, torch.float32)
    values, tokens = topk(given, min(count, size))
    wanted = given.topk(min(count, size)).values
    assert torch.equal(values.nan_to_num(1e9), wanted.nan_to_num(1e9))
    assert int(tokens.min()) >= 0 and int(tokens.max()) < size
    there = values != -torch.inf
    assert torch.equal(given.gather(-1, tokens)[there].nan_to_num(1e9), wanted[there].nan_to_num(1e9))
    for row, chances in zip(tokens.flatten(0, 1).tolist(), values.flatten(0, 1).tolist(), strict=True):
        found = [token for token, chance in zip(row, chances, strict=True) if chance != -torch.inf]
        assert len(set(found)) == len(found)
