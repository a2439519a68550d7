"""Verification without copies of keys and values, and nothing else changed by it."""

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import head_pairs
import models
import pytest
import stream_models
import torch
import toy_drafters as drafters
from compare import PROMPTS, Sides
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdec import BatchDecoder, DraftModelDrafter, PromptLookupDrafter
from hf_specdec.protocol import Draft, DraftContext, Sequences
from hf_specdec.target.cache import RaggedCache
from hf_specdec.target.grouped import grouped_attention
from hf_specdec.target.inputs import CACHE


class Module:
    """What stock attention asks of a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


def attend(groups: int, inputs: tuple[torch.Tensor | None, ...], **options: Any) -> torch.Tensor:
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](Module(groups), *inputs, **options)[0]
    return output


@pytest.mark.parametrize("groups", [2, 3])
def test_heads_of_a_single_token_that_sees_all_are_grouped(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values, _ = made(2, groups, 1, 40, "bool")
    stock, shapes = attend(groups, (query, keys, values, None), scaling=0.3), []

    def seen(query: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(query.shape))
        return torch.nn.functional.scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr("hf_specdec.target.grouped.scaled_dot_product_attention", seen)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with grouped_attention():
        torch.testing.assert_close(attend(groups, (query, keys, values, None), scaling=0.3), stock)
        assert shapes == [(2, 2, groups, 16)]
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # more than there are heads of keys
        assert torch.equal(attend(groups, (query, keys, values, None), scaling=0.3), stock)
        query, keys, values, _ = made(2, groups, 5, 5, "bool")  # a prompt: each token sees those before it
        assert torch.equal(attend(groups, (query, keys, values, None)), causal(query, keys, values))
    assert len(shapes) == 1


def causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, size]"""
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def made(rows: int, groups: int, width: int, end: int, kind: str) -> tuple[torch.Tensor, ...]:
    """Query, keys, values and a mask; keys are part of a larger buffer, as a cache gives them."""
    torch.manual_seed(rows + 10 * groups + 100 * width)
    query = torch.randn(rows, width, 2 * groups, 16).transpose(1, 2)
    keys, values = (torch.randn(rows, 2, end + 8, 16)[:, :, :end] for _ in range(2))
    seen = torch.rand(rows, 1, width, end) < 0.5
    seen[..., 0] = True
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return query, keys, values, mask


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_is_the_same_attention(rows: int, groups: int, width: int, kind: str) -> None:
    inputs = made(rows, groups, width, 40, kind)
    stock = attend(groups, inputs, scaling=0.3)
    with grouped_attention():
        for _ in range(2):  # a second layer has the same mask
            torch.testing.assert_close(attend(groups, inputs, scaling=0.3), stock)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_of_very_different_lengths_look_at_their_own_slots(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, sizes = [40, 6, 9, 23], []
    query, keys, values, mask = made(4, 3, width, 40, "additive")
    for row, end in enumerate(ends):
        mask[row, :, :, end:] = torch.finfo(torch.float32).min
    stock = attend(3, (query, keys, values, mask))

    def seen(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(key.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, key, *args, **kwargs)

    monkeypatch.setattr("hf_specdec.target.grouped.A_CALL", 10)
    monkeypatch.setattr("hf_specdec.target.grouped.scaled_dot_product_attention", seen)
    for told, expected in ((ends, ends), ([40, 40, 38, 40], [40]), ([], [40]), ([41, 6, 9, 23], [40])):
        with grouped_attention(told):
            torch.testing.assert_close(attend(3, (query, keys, values, mask)), stock)
        assert sizes == expected
        sizes.clear()


def test_what_is_special_is_left_to_stock_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = made(2, 3, 4, 20, "additive")

    try:
        stock, refused = attend(3, inputs, softcap=30.0), nullcontext()
    except ValueError:  # but for transformers 5.17
        stock, refused = None, pytest.raises(ValueError, match="softcap")
    with grouped_attention():
        with refused:
            assert torch.equal(attend(3, inputs, softcap=30.0), stock)
        bias = torch.randn(1, 6, 4, 20)
        biased = attend(3, inputs, position_bias=bias)
    torch.testing.assert_close(biased, attend(3, inputs, position_bias=bias))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens for which keys or values were copied for each query head."""
    counted: list[int] = []
    repeat = sdpa_attention.repeat_kv

    def counting(states: torch.Tensor, times: int) -> torch.Tensor:
        counted.append(states.shape[2])
        return repeat(states, times)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    return counted


@pytest.mark.parametrize("candidates", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "uneven rows"])
def test_no_verification_copies_keys_and_values(lengths: list[int], candidates: int, copies: list[int]) -> None:
    model, draft = models.llama(), models.llama(seed=3)
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    sides = Sides(model, lengths)
    drafter = DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=candidates)
    sides.ours(drafter)  # the probe
    copies.clear()
    assert torch.equal(sides.ours(drafter), sides.plain)
    prompt = sides.prompts["input_ids"].shape[1]
    assert all(n == prompt for n in copies)  # stock forwards, the prompts', may
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.zeros(1, 1, 3, 3))
    assert 3 in copies  # stock attention does


@pytest.mark.set_times
@pytest.mark.parametrize("how", ["requests", "streams", "DFlash, mixed", "GLM-4-MoE, 3"])
def test_nor_do_others_that_are_fed_masks(how: str, copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come and go, streams in the target, heads beside it."""
    model, draft = models.llama(), models.llama(seed=3)
    drafter: Any = DraftModelDrafter(draft, num_draft_tokens=3)
    if how in head_pairs.PAIRS:
        head_pairs.never_declined(monkeypatch)
        model, drafter = head_pairs.PAIRS[how]()
    if how == "streams":
        model = stream_models.target_of("Llama")
        drafter = stream_models.streams_of(model)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    prompts = models.prompts([7, 4])
    model.generate(**prompts, **options, assistant_model=drafter)  # the probe
    copies.clear()
    if how == "requests":
        with BatchDecoder(model, drafter, max_rows=2) as decoder:
            answers = [decoder.submit(row, max_new_tokens=16, do_sample=False) for row in prompts["input_ids"]]
            assert all(answer.result(60) for answer in answers)
    else:
        model.generate(**prompts, **options, assistant_model=drafter)
        assert drafter.last_stats.drafted_tokens
    assert all(n == prompts["input_ids"].shape[1] for n in copies)


def test_a_chain_of_one_row_is_fed_without_a_mask() -> None:
    """transformers makes the one that several tokens behind others need, for all layers together."""
    model, seen, given = models.llama(), [], []
    sides = Sides(model, [7])
    layers = [layer.self_attn for layer in model.model.layers]

    def fed(part: Any, _: Any, options: dict[str, Any]) -> None:
        seen.append(options) if part is model else given.append(options["attention_mask"])

    hooks = [part.register_forward_pre_hook(models.spy(fed), with_kwargs=True) for part in (model, *layers)]
    models.probed(model)
    seen.clear(), given.clear()
    try:
        assert torch.equal(sides.ours(), sides.plain)
    finally:
        for hook in hooks:
            hook.remove()
    assert sides.stats.mode == "lockstep" and any(options["input_ids"].shape[1] > 1 for options in seen[1:])
    assert all(options.get("attention_mask") is None for options in seen)
    for i, options in enumerate(seen):
        masks = given[i * len(layers) : (i + 1) * len(layers)]
        assert all(mask is masks[0] for mask in masks)
        assert (masks[0] is None) == (i == 0 or options["input_ids"].shape[1] == 1)


def test_other_calls_of_the_model_are_what_they_were(copies: list[int]) -> None:
    """Bit for bit, behind a call and beside one."""
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model, seen = models.llama(), []
    ids, mask = torch.arange(6)[None], torch.zeros(1, 1, 6, 6)

    def logits() -> None:
        with torch.no_grad():
            seen.append(model(ids, attention_mask=mask).logits)

    logits()
    sides = Sides(model, [7])
    sides.ours(PromptLookupDrafter())
    logits()
    copies.clear()
    with grouped_attention():
        beside = threading.Thread(target=logits)
        beside.start()
        beside.join()
    assert copies and all(torch.equal(seen[0], other) for other in seen[1:])
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_blocks_of_several_threads_end_in_any_order() -> None:
    stock, inside, leave = ALL_ATTENTION_FUNCTIONS["sdpa"], threading.Event(), threading.Event()

    def stay() -> None:
        with grouped_attention():
            inside.set()
            leave.wait(10)

    beside = threading.Thread(target=stay)
    with grouped_attention():
        beside.start()
        inside.wait(10)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
    leave.set()
    beside.join()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


@pytest.mark.parametrize(
    ("name", "lengths", "plain"),
    [("Llama", [7], True), ("Llama", [7, 7], True), ("Llama", [7, 4], False), ("Mistral", [7], False)],
    ids=["one row", "equal rows", "padding", "window"],
)
def test_a_round_without_a_draft_needs_no_mask(
    name: str, lengths: list[int], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every token is seen, as plain decoding needs none; and its heads are grouped all the same. With a draft,
    behind padding and in windows there is one. What was rejected lies in the slots behind it."""
    alone = []

    def seen(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        alone.append(attn_mask is None)
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("hf_specdec.target.grouped.scaled_dot_product_attention", seen)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model, masked = models.build(name), dict[int, set[bool]]()
    sides = Sides(model, lengths)
    future, rounds = drafters.Future(sides.plain), itertools.count()

    def propose(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        right = future(sequences, room, 3 if next(rounds) == 2 else 0)
        return Draft.from_lists([[(token + 1) % models.VOCAB for token in row] for row in right])

    def saw(_: Any, args: Any, options: dict[str, Any]) -> None:
        if isinstance(options.get(CACHE), RaggedCache):
            masked.setdefault(options["input_ids"].shape[1], set()).add(options["attention_mask"] is not None)

    hook = model.register_forward_pre_hook(models.spy(saw), with_kwargs=True)
    models.probed(model)
    alone.clear(), masked.clear()
    try:
        assert torch.equal(sides.ours(drafters.Toy(propose, trees=True)), sides.plain)
    finally:
        hook.remove()
    assert masked[1] == {not plain} and masked[4] == {True}
    assert any(alone) is plain
