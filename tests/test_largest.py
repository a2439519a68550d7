"""The largest of many scores, found by blocks, are those that torch finds."""

import pytest
import torch

from hf_specdec.judge.largest import BLOCK, MANY, argmax, topk

SIZES = [5, MANY - 1, MANY, MANY + 1, MANY + BLOCK - 1, 49152, 50257]


def scores(kind: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(3, 2, size, generator=generator)
    if kind == "equals":  # a few values, each of which stands in many places
        drawn = drawn.mul(2).round()
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_first_of_the_largest(kind: str, size: int, dtype: torch.dtype) -> None:
    given = scores(kind, size, dtype)
    assert torch.equal(argmax(given), given.argmax(-1))
    assert torch.equal(argmax(given[:, 0, : size - 2]), given[:, 0, : size - 2].argmax(-1))  # not contiguous


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["any", "equals", "forbidden"])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_so_many_of_the_largest_are_found_once_each(kind: str, size: int, count: int) -> None:
    given = scores(kind, size, torch.float32)
    count = min(count, 4 if kind == "forbidden" else size)
    values, tokens = topk(given, count)
    assert torch.equal(values, given.topk(count).values)
    assert torch.equal(given.gather(-1, tokens), values)
    assert all(len(set(row)) == count for row in tokens.flatten(0, 1).tolist())
