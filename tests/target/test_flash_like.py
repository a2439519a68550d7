"""Attention that takes no 4-D mask, as FlashAttention: chains go to it, causal; a mask would end the process on a GPU.

The stand-in computes what FlashAttention does, and raises where that would misread what it is given.
"""

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dflash_models
import head_pairs
import models
import mtp_heads
import pytest
import stream_models
import torch
from each_kind import MAKES
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdec import (
    BatchDecoder,
    PromptLookupDrafter,
    SpeculationError,
    SpeculationWarning,
)
from hf_specdec.drafters.streaming import Upper
from hf_specdec.target.probe import Support, ability
from hf_specdec.train.streaming.run import _try

NAMES = ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "somebody-elses"]
MISREAD: list[str] = []
"""what would have gone wrong: errors within a drafter are caught, and must not go unseen"""


def flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal, the last token of [B, heads, T, size] beside the last of the keys, with a mask [B, S] of padding."""
    rows, heads, width, size = query.shape
    slots = key.shape[2]
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape != (rows, slots)):
        MISREAD.append(f"a mask {tuple(attention_mask.shape)} for {rows} rows of {slots} slots")
        raise AssertionError(f"device-side assertion: {MISREAD[-1]}")
    key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
    distance = torch.arange(slots - width, slots)[:, None] - torch.arange(slots)
    seen = (distance >= 0) & (distance < (sliding_window or slots))
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None].bool()
    scores = (query @ key.mT * (scaling or size**-0.5)).masked_fill(~seen, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The stand-in under all names, which afterwards stand for what they did."""
    both = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    before = [dict(functions._global_mapping) for functions in both]
    for name in NAMES:
        ALL_ATTENTION_FUNCTIONS.register(name, flash)
    for name in NAMES[:3]:  # the last brings no function of masks, and transformers gives it none
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, flash_attention_mask)
    MISREAD.clear()
    yield
    for functions, known in zip(both, before, strict=True):
        functions._global_mapping.clear()
        functions._global_mapping.update(known)
    assert not MISREAD


def flashing(model: Any, name: str = NAMES[0]) -> Any:
    model.config._attn_implementation = name  # `set_attn_implementation` asks for the library of that name
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = name
    return model


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Our warnings of the block: a file that is closed late elsewhere warns, too."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
        lines += [str(warning.message) for warning in caught if issubclass(warning.category, SpeculationWarning)]


def options(lengths: list[int], **more: Any) -> dict[str, Any]:
    return {**models.prompts(lengths), "max_new_tokens": 24, "do_sample": False} | more


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("lengths", [[7], [7, 4], [5, 5]], ids=["one row", "uneven rows", "even rows"])
@pytest.mark.parametrize("who", ["target", "draft", "both"])
@pytest.mark.parametrize("kind", MAKES)
def test_the_text_is_plains_and_no_mask_is_misread(kind: str, who: str, lengths: list[int]) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    if who != "draft":
        flashing(target)
    if who != "target":
        flashing(draft)
    drafter = MAKES[kind](target, draft)
    plain = target.generate(**options(lengths))
    with said() as lines:
        for _ in range(2):
            assert torch.equal(target.generate(**options(lengths), assistant_model=drafter), plain)
        sampled = target.generate(**options(lengths, do_sample=True, top_k=0), assistant_model=drafter)
    assert sampled.shape == plain.shape and drafter.last_stats.drafted_tokens > 0
    if who != "draft":
        assert drafter.last_stats.mode in ("lockstep", "staggered")
    assert all("does not accept custom masks" in line for line in lines), lines


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2 sliding", "Qwen3-MoE"])
def test_it_is_known_by_whatever_name(name: str, architecture: str) -> None:
    model = flashing(models.build(architecture), name)
    assert ability(model).support is Support.LOCKSTEP and name in ability(model).why
    for lengths in ([9], [9, 3]):
        plain = model.generate(**options(lengths))
        drafter = PromptLookupDrafter(num_branches=2)
        assert torch.equal(model.generate(**options(lengths), assistant_model=drafter), plain)
        assert drafter.last_stats.drafted_tokens > 0


def test_what_was_found_out_is_of_the_attention_that_the_decoder_has() -> None:
    """Which a composite model's own config may say otherwise."""
    model = models.llama()
    assert ability(model).support is Support.RAGGED
    assert ability(flashing(model)).support is Support.LOCKSTEP
    assert ability(flashing(model, "sdpa")).support is Support.RAGGED


# ------------------------------------------------------------------ what is not possible, in one line


def test_a_batch_of_requests_refuses_such_a_target() -> None:
    with pytest.raises(SpeculationError, match=r"flash_attention_2.* does not accept custom masks; use model.generate"):
        BatchDecoder(flashing(models.llama()), None)


@pytest.mark.parametrize("kind", ["draft", "tree", "hybrid", "disco"])
def test_a_batch_of_requests_goes_on_without_such_a_draft(kind: str) -> None:
    target = models.llama()
    drafter = MAKES[kind](target, flashing(models.llama(seed=3)))
    plain = {n: target.generate(**options([n]))[0, n:].tolist() for n in (7, 4)}
    with said() as lines, BatchDecoder(target, drafter, max_rows=2) as decoder:
        answers = {n: decoder.submit(options([n]).pop("input_ids"), max_new_tokens=24, do_sample=False) for n in plain}
        for n, answer in answers.items():
            assert answer.result(60) == plain[n]
    assert len(lines) == 1 and "does not support rows of different lengths" in lines[0]


@pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=["one row", "uneven rows"])
def test_streams_are_left_out(lengths: list[int]) -> None:
    target = flashing(stream_models.target_of("Llama"))
    drafter = stream_models.streams_of(target)
    plain = target.generate(**options(lengths))
    with said() as lines:
        assert torch.equal(target.generate(**options(lengths), assistant_model=drafter), plain)
    assert sum("was dropped: its runner needs rows of different lengths" in line for line in lines) == 1
    assert all("dropped" in line or "does not accept custom masks" in line for line in lines), lines


def test_no_streams_are_trained_in_it() -> None:
    target = flashing(stream_models.target_of("Llama"))
    with pytest.raises(SpeculationError, match=r"flash_attention_2.* does not accept.*; load it with"):
        _try(None, SimpleNamespace(target=target), Upper(target, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=["one row", "uneven rows"])
@pytest.mark.parametrize("pair", ["DFlash, mixed", "GLM-4-MoE, 3"])
def test_heads_draft_with_their_own_attention(pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    head_pairs.never_declined(monkeypatch)
    mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()
    try:
        target, drafter = head_pairs.PAIRS[pair]()
        flashing(target)
        plain = target.generate(**options(lengths))
        assert torch.equal(target.generate(**options(lengths), assistant_model=drafter), plain)
        assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0
        own = getattr(drafter, "draft_model", None) or drafter.model
        own.config._attn_implementation = NAMES[0]
        with pytest.raises(SpeculationError, match='load their model with attn_implementation="sdpa"'):
            target.generate(**options(lengths), assistant_model=drafter)
    finally:
        mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()
