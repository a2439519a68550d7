"""Attention over long texts in splits: the same attention, of the same memory, and the same text."""

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from captured_calls import CAPTURED, DRAFTERS, decode
from counting import Launches
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from traced import Traced, traced

from hf_specdec import SpeculationWarning
from hf_specdec.target import grouped, splits
from hf_specdec.target.buffers import WIDTHS
from hf_specdec.target.masks import allowed_slots, as_bias, tree_shape
from hf_specdec.target.splits import attend_in_splits, split_mask, splits_for

SLOTS, GROUPS = 2048, 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TREE = [-1, 0, 0, 1, 1, 2, 5, 0]
MASKS = ["chain", "padding", "window", "tree"]


def made(rows: int, width: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Query, keys and values; heads of keys and values have room between them, as in buffers."""
    torch.manual_seed(rows + 10 * width + 1000 * size)
    query = torch.randn(rows, GROUPS * 2, width, size).reshape(rows, 2, GROUPS * width, size)
    keys, values = (torch.randn(rows, 2, SLOTS + 64, size)[:, :, :SLOTS] for _ in range(2))
    return 2 * query.to(dtype), keys.to(dtype), values.to(dtype)


def mask_of(kind: str, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, 1, groups · T, S] of rows of quite different lengths: some see nothing of several splits."""
    ends = torch.tensor([SLOTS - width, 300, 7][:rows])
    tree = [parent if parent >= 0 else place - 1 for place, parent in enumerate([*TREE, *[-1] * width][:width])]
    seen, depth = tree_shape([tree], ends.device)
    allowed, distance = allowed_slots(ends, SLOTS, seen if kind == "tree" else None, depth)
    if kind == "padding":
        allowed[:, :, :5] = False
    bias = as_bias(allowed, distance, {"": 400 if kind == "window" else None}, dtype)
    return bias.expand(-1, GROUPS, -1, -1).flatten(1, 2)[:, None]  # type: ignore[union-attr]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, int]]]:
    """A CPU like a GPU where 64 slots are long: how often so many queries were attended in so many splits."""
    attended: Counter[tuple[int, int]] = Counter()

    def counted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: Any) -> Tensor:
        attended[query.shape[2], mask.shape[1]] += 1
        return attend_in_splits(query, key, value, mask, scale)

    monkeypatch.setitem(splits.MULTIPROCESSORS, "cpu", lambda device: 132)
    monkeypatch.setattr(splits, "LONG", 64)
    monkeypatch.setattr(splits, "SHORTEST", 16)
    monkeypatch.setattr(grouped, "attend_in_splits", counted)
    splits._are_right.cache_clear()
    yield attended
    splits._are_right.cache_clear()


# ---------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_splits_are_the_same_attention(dtype: torch.dtype, kind: str) -> None:
    for rows, width, size in ((1, 1, 64), (1, 8, 128), (1, 62, 64), (3, 1, 128), (3, 8, 64)):
        query, keys, values = made(rows, width, size, dtype)
        mask = mask_of(kind, rows, width, dtype)
        plain = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.1)
        for number in (1, 2, 4, 8):
            split = attend_in_splits(query, keys, values, split_mask(mask, rows, 2, number), 0.1)
            torch.testing.assert_close(split.to(dtype), plain, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("hidden", ["min", "-inf"])
def test_what_is_hidden_weighs_nothing(hidden: str) -> None:
    """Whatever lies there; and a row that sees nothing at all stays finite."""
    query, keys, values = made(3, 8, 64)
    values[:, :, SLOTS // 2 :] = 1e30
    mask = torch.zeros(3, 1, 8 * GROUPS, SLOTS)
    mask[..., SLOTS // 2 :] = float("-inf") if hidden == "-inf" else torch.finfo(mask.dtype).min
    split = attend_in_splits(query, keys, values, split_mask(mask, 3, 2, 8))
    half = scaled_dot_product_attention(query, *(each[:, :, : SLOTS // 2] for each in (keys, values)))
    torch.testing.assert_close(split, half, atol=1e-5, rtol=0)
    mask[1] = mask[0, 0, 0, -1]
    assert attend_in_splits(query, keys, values, split_mask(mask, 3, 2, 8)).isfinite().all()


def test_kernels_are_given_finite_masks_and_views_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU multiply by log2(e), and what is infinite then is NaN where a whole split is hidden."""
    given, attended = [], splits.attended
    monkeypatch.setattr(splits, "attended", lambda *all_of_it: given.append(all_of_it) or attended(*all_of_it))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (1, 3):
            query, keys, values = made(rows, 8, 64, dtype)
            mask = split_mask(mask_of("chain", rows, 8, dtype), rows, 2, 8)
            with Launches() as launches:
                attend_in_splits(query, keys, values, mask)
            assert sum(launches.met.values()) <= 4, launches.met  # the kernel, the weights, a product, a sum
            _, key, value, bias, _ = given.pop()
            for view, whole in ((key, keys), (value, values)):
                assert view.shape == (rows * 2, 8, SLOTS // 8, 64)
                assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert (bias.float() * 1.4427).isfinite().all()
            stored = bias.untyped_storage().nbytes() // bias.element_size()
            assert stored == bias.numel() // (2 if rows == 1 else 1)  # one row's is shared by its heads


# ---------------------------------------------------------------------- where keys are split


@pytest.mark.parametrize(
    ("rows", "heads", "queries", "slots", "expected"),
    [
        (1, 8, 4, 16384, 16),
        (1, 8, 4, 4096, 8),
        (1, 8, 4, 2048, 4),
        (1, 8, 4, 1024, 1),
        (1, 8, 4, 16384 - 64, 1),
        (1, 8, 256, 16384, 4),
        (1, 8, 2048, 16384, 1),
        (4, 8, 4, 16384, 4),
        (8, 8, 4, 16384, 2),
        (16, 8, 4, 16384, 1),
    ],
)
def test_the_work_fills_the_device_once(
    rows: int, heads: int, queries: int, slots: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.empty(rows, heads, queries, 16), torch.empty(rows, heads, 16384, 16)[:, :, :slots]
    mask = torch.empty(rows, 1, queries, slots)
    assert splits_for(query, key, key, mask) == 1
    monkeypatch.setitem(splits.MULTIPROCESSORS, "cpu", lambda device: 132)
    assert splits_for(query, key, key, mask) == expected
    assert splits_for(query, key, key, mask > 0) == splits_for(query, key, key, mask[..., 1:]) == 1
    if rows > 1:
        apart = key.expand(2, *key.shape).transpose(1, 2).flatten(0, 1)[::2]  # between whose rows others lie
        assert splits_for(query, apart, apart, mask) == 1


@pytest.mark.parametrize("fault", ["raises", "base 2", "NaN"])
def test_where_splits_are_wrong_there_are_none(fault: str, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attended = splits.attended

    def faulty(*given: Any) -> tuple[Tensor, Tensor]:
        if fault == "raises":
            raise RuntimeError("no kernel found")
        seen, logs = attended(*given)
        return seen, logs * 1.4427 if fault == "base 2" else logs * float("nan")

    monkeypatch.setattr(splits, "attended", faulty)
    model = models.llama()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = decode(model, DRAFTERS["lookup"](None), [9, 4], speculation=CAPTURED)
    said = [str(each.message) for each in caught if issubclass(each.category, SpeculationWarning)]
    assert len(said) == 1 and "not split on cpu" in said[0]
    assert not card and torch.equal(ours, decode(model, None, [9, 4]))


# ---------------------------------------------------------------------- in calls


@pytest.mark.real_time
@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
@pytest.mark.parametrize("kind", ["fixed", "candidates"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_text_is_plain_decodings(name: str, kind: str, lengths: list[int], card: Counter[tuple[int, int]]) -> None:
    """Chains and trees, behind padding and in windows; run, and recorded."""
    model, draft = models.build(name, "sdpa"), models.build(name, "sdpa")
    plain, drafter = decode(model, None, lengths), DRAFTERS[kind](draft)
    assert not card
    with traced():
        for _ in range(2):
            assert torch.equal(decode(model, drafter, lengths, speculation=CAPTURED), plain)
        assert Traced.played
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    assert {number for _, number in card} == {16}
    assert {width // groups for width, _ in card} <= set(WIDTHS) and len({width for width, _ in card}) > 1
    assert drafter.last_stats.accepted_tokens and not any("dropped" in note for note in drafter.last_stats.notes)


@pytest.mark.real_time
def test_heads_without_groups_are_split_as_well(card: Counter[tuple[int, int]]) -> None:
    model = models.llama(num_key_value_heads=models.llama().config.num_attention_heads)
    plain = decode(model, None, [9, 4])
    assert torch.equal(decode(model, DRAFTERS["lookup"](None), [9, 4], speculation=CAPTURED), plain) and card
