"""`forwards="bitwise"`: one text in any dtype, whatever drafts for it, because every forward rounds alike."""

from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
from eagle_heads import tiny
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from stream_models import streams_of
from torch import Tensor

import hf_specdec
from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    EagleDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
)
from hf_specdec.engine import requests
from hf_specdec.target import near
from hf_specdec.target.buffers import WIDEST
from hf_specdec.target.captured import Captured, alike
from hf_specdec.target.packing import packable_dtypes
from hf_specdec.target.ragged import RaggedRunner
from hf_specdec.target.rounding import TEXT, TRIED, widths_alike
from hf_specdec.target.shelf import shelf_of

BITWISE = {"forwards": "bitwise"}
KINDS = [
    (dtype, packed)
    for dtype in (torch.float32, torch.bfloat16)
    for packed in (False, True)
    if not packed or dtype in packable_dtypes().values()
]
"""what this CPU multiplies"""
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "lookup": lambda draft: PromptLookupDrafter(),
    "lookup, branches": lambda draft: PromptLookupDrafter(num_branches=3),
    "window of 3": lambda draft: DraftModelDrafter(draft, num_draft_tokens=3),
    "window of 40": lambda draft: DraftModelDrafter(draft, num_draft_tokens=40),
    "hybrid": lambda draft: HybridDrafter(draft),
    "pearl": lambda draft: PearlDrafter(draft, window=4),
    "EAGLE-3": lambda draft: EagleDrafter(tiny(256, known=200, hidden=256), num_draft_tokens=5),
}
IN_TREES = ("lookup, branches", "hybrid", "EAGLE-3")


JOINED: dict[str, Callable[[Any], Any]] = {
    "nobody": lambda draft: None,
    "lookup, branches": DRAFTERS["lookup, branches"],
    "window of 3": DRAFTERS["window of 3"],
    "a window by times": lambda draft: DraftModelDrafter(draft),
    "hybrid": DRAFTERS["hybrid"],
}


def target(dtype: torch.dtype, packed: bool) -> Any:
    model = models.llama(256, hidden_size=256, intermediate_size=688, head_dim=32).to(dtype)
    if packed:
        hf_specdec.pack_linear(model)
    return model


def decode(model: Any, drafter: Any, lengths: list[int], **more: Any) -> Tensor:
    settings = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0} | more
    prompts = models.prompts(lengths, 256)
    return model.generate(
        **prompts, **settings, assistant_model=drafter, speculation=BITWISE | more.get("speculation", {})
    )


@pytest.fixture(autouse=True)
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, as on a card."""
    monkeypatch.setattr(near, "GATHERS", ("cpu",))


@pytest.fixture
def branching(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Sequence[int]]]:
    """Parents of drafts that were no chains."""
    met, find = [], Captured.find

    def spied(runner: Any, tokens: Any, parents: Any, *more: Any) -> Any:
        met.extend([parents] if parents is not None else [])
        return find(runner, tokens, parents, *more)

    monkeypatch.setattr(Captured, "find", spied)
    return met


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize(("dtype", "packed"), KINDS)
def test_one_text_whatever_drafts(
    dtype: torch.dtype, packed: bool, lengths: list[int], branching: list[Sequence[Sequence[int]]]
) -> None:
    model, draft = target(dtype, packed), target(dtype, packed)
    alone = decode(model, None, lengths)
    for kind, make in DRAFTERS.items():
        drafter = make(draft)
        branching.clear()
        assert torch.equal(decode(model, drafter, lengths), alone), kind
        assert drafter.last_stats.drafted_tokens, kind
        assert bool(branching) == (kind in IN_TREES), kind


def test_drafts_are_chains_where_to_gather_keys_costs_more_than_trees_gain(
    monkeypatch: pytest.MonkeyPatch, branching: list[Sequence[Sequence[int]]]
) -> None:
    monkeypatch.setattr(near, "GATHERS", ())
    model = target(torch.bfloat16, False)
    alone = decode(model, None, [9])
    assert torch.equal(decode(model, DRAFTERS["lookup, branches"](None), [9]), alone)
    assert not branching


def test_one_text_of_a_seed() -> None:
    """Draws, too, where their random numbers belong to places."""
    dtype = list(packable_dtypes().values())[-1]
    model, texts = target(dtype, True), []
    for make in (lambda _: None, *DRAFTERS.values()):
        torch.manual_seed(3)
        coupled = {"do_sample": True, "speculation": BITWISE | {"sampling": "coupled"}}
        prompts = models.prompts([9, 5], 256)
        texts.append(
            model.generate(**prompts, **coupled, max_new_tokens=48, pad_token_id=0, assistant_model=make(model))
        )
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lookup, branches", "hybrid"])
def test_draws_have_the_targets_distribution(kind: str) -> None:
    """The power is that of test_distribution's tests."""
    small, (told, processors) = models.small(VOCAB), SETTINGS["temperature"]
    drafter = DRAFTERS[kind](small)
    counts = sample(small, drafter, FEWER, 500, speculation=BITWISE, **told)
    assert drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


def test_without_a_drafter_the_statistics_are_on_the_output() -> None:
    model = target(torch.bfloat16, False)
    output = decode(model, None, [9], return_dict_in_generate=True)
    assert output.speculation.mode and output.speculation.drafted_tokens == 0


def test_what_cannot_be_bitwise_is_refused() -> None:
    model = models.llama()
    with pytest.raises(SpeculationError, match=r"forwards=.bitwise. needs speculation.*returns hidden states"):
        decode(model, PromptLookupDrafter(), [9], output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(SpeculationError, match="changes their shape"):
        decode(model, streams_of(model, 1), [9])
    with pytest.raises(SpeculationError, match="forwards must be 'auto' or 'eager'"):
        model.generate(
            **models.prompts([9]), speculation={"forwards": "exactly"}, assistant_model=PromptLookupDrafter()
        )


# ---------------------------------------------------------------------- rows that come and go


def joined(model: Any, drafter: Any) -> BatchDecoder:
    return BatchDecoder(model, drafter, max_rows=3, max_tokens=2048, forwards="bitwise")


def asked(decoder: BatchDecoder, i: int) -> Any:
    """The i-th request: every third one is drawn, with a seed of its own."""
    torch.manual_seed(i)
    ids = models.prompts([5 + 7 * i % 31], 256, seed=i)["input_ids"]
    return decoder.submit(ids, max_new_tokens=16, do_sample=i % 3 == 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_does_not_depend_on_who_is_beside_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the order in which they come, who has left before, or who drafts."""
    monkeypatch.setattr(requests, "LEAST_PIECE", 4)
    monkeypatch.setattr(requests, "LONGEST_PIECE", 12)
    model, draft, order = target(dtype, False), target(dtype, False), [0, 1, 2, 3, 4, 5]
    with joined(model, None) as decoder:
        alone = {i: asked(decoder, i).result() for i in order}
    read, met = RaggedRunner.read, set()

    def spied(runner: Any, tokens: Tensor, seen: Tensor | None, *more: Any, **inputs: Any) -> Any:
        if runner.model is model:
            met.add((*tokens.shape, runner.cache.slots.end))
        return read(runner, tokens, seen, *more, **inputs)

    monkeypatch.setattr(RaggedRunner, "read", spied)
    for kind, make in JOINED.items():
        for each in (order, order[::-1]):
            with joined(model, make(draft)) as decoder:
                answers = {}
                for i in each:
                    answers[i] = asked(decoder, i)
                    for _ in zip(range(i), answers[i], strict=False):  # the next one comes when it has so many tokens
                        pass
                assert {i: answers[i].result() for i in order} == alone, kind
            assert (decoder.stats.drafted_tokens > 0) == (kind != "nobody"), kind
            assert not [note for note in decoder.stats.notes if "dropped" in note], kind
    shapes = {(4, width, 512) for width in alike(model, 4, 512 - 2 * WIDEST, True)}
    assert met <= shapes, "rows, width, slots"
    assert len(shelf_of(model).kept) == 1, "the trial's buffers are the batch's"


def test_what_a_batch_decoder_cannot_keep_alike_is_refused() -> None:
    model = target(torch.float32, False)
    with joined(model, None) as decoder:
        with pytest.raises(SpeculationError, match=r"max_tokens=2048, of which .* an equal share"):
            decoder.submit([1, 2, 3], max_new_tokens=400)
        with pytest.raises(SpeculationError, match=r"lenience=0.5 lets drafts change the text"):
            decoder.submit([1, 2, 3], max_new_tokens=4, speculation={"lenience": 0.5})
    with pytest.raises(SpeculationError, match="set max_tokens to 1024 or more, or lower max_rows"):
        BatchDecoder(model, max_rows=3, max_tokens=1023, forwards="bitwise")
    with pytest.raises(SpeculationError, match="changes the shape of the target's forwards"):
        joined(model, streams_of(model, 1))
    with pytest.raises(SpeculationError, match="load it in bfloat16"):
        joined(target(torch.float16, False), None)
    model.model.layers[0].register_forward_hook(models.spy(lambda *_: None))
    with pytest.raises(SpeculationError, match="LlamaForCausalLM has hooks"):
        joined(model, None)


# ---------------------------------------------------------------------- the trial


def rounding(kernel: Callable[[int, int], float]) -> Callable[[Tensor, int, int], Tensor]:
    """A model whose logits behind a token are the token, and what a kernel adds to it by width and place."""

    def feed(tokens: Tensor, place: int, width: int) -> Tensor:
        errors = torch.tensor([kernel(width, i) for i in range(width)])
        return tokens[..., None].double() + errors[:, None]

    return feed


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (lambda width, i: 0.0, TRIED),
        (lambda width, i: float(width >= 8), (1, 2, 4)),
        (lambda width, i: float(width < 8), (1, 2, 4)),  # as many as above 8, and cheaper
        (lambda width, i: float(width == 1), (2, 4, 8, 16, 32)),
        (lambda width, i: float(width == 8), (1, 2, 4, 16, 32)),
        (lambda width, i: float(i % 4 == 3), (1, 2)),  # elsewhere it matters where a token stands
        (lambda width, i: float(i) + 0.5 * (width > 1), (1,)),
        (lambda width, i: torch.rand(()).item(), ()),
    ],
)
def test_widths_that_round_alike_are_found(kernel: Callable[[int, int], float], found: tuple[int, ...]) -> None:
    assert widths_alike(rounding(kernel), 2, 97, torch.device("cpu")) == found


@pytest.mark.parametrize(
    "error",
    [
        lambda tokens: torch.arange(len(tokens))[:, None].expand_as(tokens),
        lambda tokens: tokens.sum(0, keepdim=True) - tokens,
        lambda tokens: tokens.cumsum(0) - tokens,
        lambda tokens: (tokens.roll(1, 0) == tokens) * (torch.arange(len(tokens)) == 1)[:, None],
        lambda tokens: (tokens.roll(1, 0) != tokens) * (torch.arange(len(tokens)) == 1)[:, None],
    ],
    ids=["the row", "what others hold", "what those above hold", "a second row like the first", "one unlike the first"],
)
def test_what_depends_on_other_rows_is_found(error: Callable[[Tensor], Tensor]) -> None:
    def feed(tokens: Tensor, place: int, width: int) -> Tensor:
        return (tokens + error(tokens) * (width > 2))[..., None]

    assert widths_alike(feed, 4, 97, torch.device("cpu")) == (1, 2)


def test_the_trial_feeds_a_text_in_pieces() -> None:
    """Whatever the width, place and width stay within the text and the room behind it."""
    met = []
    widths_alike(
        lambda tokens, place, width: met.append((place, width)) or tokens[..., None], 1, 97, torch.device("cpu")
    )
    assert {width for _, width in met} == set(TRIED)
    assert max(place + width for place, width in met) <= TEXT + TRIED[-1]
