"""`forwards="bitwise"`: one text in any dtype, whatever drafts for it, because every forward rounds alike."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from stream_models import streams_of
from torch import Tensor

import hf_specdec
from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.target.packing import packable_dtypes
from hf_specdec.target.rounding import TEXT, TRIED, widths_alike

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


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize(("dtype", "packed"), KINDS)
def test_one_text_whatever_drafts(dtype: torch.dtype, packed: bool, lengths: list[int]) -> None:
    model, draft = target(dtype, packed), target(dtype, packed)
    alone = decode(model, None, lengths)
    for kind, make in DRAFTERS.items():
        drafter = make(draft)
        assert torch.equal(decode(model, drafter, lengths), alone), kind
        assert drafter.last_stats.drafted_tokens, kind


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


# ---------------------------------------------------------------------- the trial


def rounding(kernel: Callable[[int, int], float]) -> Callable[[Tensor, int, int], Tensor]:
    """A model whose logits behind a token are the token, and what a kernel adds to it by width and place."""

    def feed(tokens: Tensor, place: int, width: int) -> Tensor:
        errors = torch.tensor([kernel(width, i) for i in range(width)])
        return tokens[..., None].double() + errors[:, None]

    return feed


@pytest.mark.parametrize(
    ("kernel", "alike"),
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
def test_widths_that_round_alike_are_found(kernel: Callable[[int, int], float], alike: tuple[int, ...]) -> None:
    assert widths_alike(rounding(kernel), 2, 97, torch.device("cpu")) == alike


def test_the_trial_feeds_a_text_in_pieces() -> None:
    """Whatever the width, place and width stay within the text and the room behind it."""
    met = []
    widths_alike(
        lambda tokens, place, width: met.append((place, width)) or tokens[..., None], 1, 97, torch.device("cpu")
    )
    assert {width for _, width in met} == set(TRIED)
    assert max(place + width for place, width in met) <= TEXT + TRIED[-1]
