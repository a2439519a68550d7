"""The ragged cache is a list of rows that grow, shrink, leave and come back."""

import random

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from hf_specdec.target.cache import BLOCK, RaggedCache, is_adoptable

LAYERS, HEADS, SIZE = 2, 2, 4


def stock(rows: int, columns: int, seed: int = 0) -> DynamicCache:
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=LAYERS))
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, rows, HEADS, columns, SIZE, generator=generator).unbind(), layer)
    return cache


class Lists:
    """The same, written plainly: per layer and row a list of key vectors."""

    def __init__(self, cache: DynamicCache) -> None:
        self.keys = [[list(row.transpose(0, 1)) for row in layer.keys] for layer in cache.layers]

    def check(self, cache: RaggedCache) -> None:
        for layer, rows in zip(cache.layers, self.keys, strict=True):
            for b, row in enumerate(rows):
                assert cache.lengths[b] == len(row)
                assert torch.equal(layer.keys[b, :, : len(row)].transpose(0, 1), torch.stack(row))
                assert torch.equal(layer.values[b, :, : len(row)], -layer.keys[b, :, : len(row)])


def feed(cache: RaggedCache, lists: Lists, width: int, generator: torch.Generator) -> None:
    rows = len(cache.lengths)
    cache.reserve(width)
    for i, layer in enumerate(cache.layers):
        new = torch.randn(rows, HEADS, width, SIZE, generator=generator)
        keys, values = cache.update(new, -new, i)
        assert keys.shape[2] == values.shape[2] == max(cache.lengths) + width
        for b in range(rows):
            lists.keys[i][b] += list(new[b].transpose(0, 1))
        assert layer.keys.shape[2] >= keys.shape[2]


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_operations(seed: int) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    source = stock(5, 6)
    for layer in source.layers:
        layer.values = -layer.keys
    lists, cache = Lists(source), RaggedCache(source)
    for _ in range(40):
        lengths, width = list(cache.lengths), dice.randint(1, 7)
        feed(cache, lists, width, generator)
        operation = dice.choice(["truncate", "level", "path", "leave"])
        if operation == "path":
            paths = [sorted(dice.sample(range(width), dice.randint(0, width))) for _ in lengths]
            cache.set_lengths(lengths)
            cache.keep(paths)
            cache.set_lengths([n + len(path) for n, path in zip(lengths, paths, strict=True)])
            for rows in lists.keys:
                for b, path in enumerate(paths):
                    rows[b] = rows[b][: lengths[b]] + [rows[b][lengths[b] + i] for i in path]
        else:
            kept = [n + dice.randint(0, width) for n in lengths]
            if operation == "level":  # what comes next is written as a block
                kept = [min(lengths) + width] * len(lengths)
            cache.set_lengths(kept)
            lists.keys = [[row[:n] for row, n in zip(rows, kept, strict=True)] for rows in lists.keys]
        if operation == "level":
            cache.lay_out(len(lengths) + 2, max(kept) + 8)
        if operation == "leave" and len(lengths) > 2:
            stay = sorted(dice.sample(range(len(lengths)), len(lengths) - 1))
            cache.select(stay)
            lists.keys = [[rows[b] for b in stay] for rows in lists.keys]
        lists.check(cache)
    assert all(layer.keys.numel() == layer.values.numel() == 0 for layer in source.layers), "held once"


def test_buffers_grow_by_blocks() -> None:
    source = stock(2, 10)
    for layer in source.layers:
        layer.values = -layer.keys
    lists, cache = Lists(source), RaggedCache(source)
    generator = torch.Generator().manual_seed(0)
    for _ in range(9):
        feed(cache, lists, 100, generator)
        cache.set_lengths([n + 100 for n in cache.lengths])
        assert cache.layers[0].keys.shape[2] <= max(cache.lengths) + BLOCK
    lists.check(cache)


def test_rows_put_aside_come_back() -> None:
    cache = RaggedCache(stock(3, 6))
    cache.set_lengths([6, 2, 4])
    rows = [cache.row(b) for b in range(3)]
    expected = [[keys.clone() for keys, _ in row] for row in rows]
    cache.select([1])
    cache.assemble(rows, [6, 2, 4])
    assert cache.lengths == [6, 2, 4]
    for b, length in enumerate(cache.lengths):
        for layer, keys in zip(cache.layers, expected[b], strict=True):
            assert torch.equal(layer.keys[b, :, :length], keys)


def test_what_can_be_adopted() -> None:
    assert is_adoptable(stock(1, 3))
    assert not is_adoptable(None)
    window = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=4))
    window.update(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), 0)
    assert is_adoptable(window)
    cache = RaggedCache(window)
    assert cache.lengths == [9] and cache.layers[0].sliding_window == 4
