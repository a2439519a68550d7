"""What a model can do is found out without harm, and where that is little it is said why."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SpeculationWarning,
)
from hf_specdec.target.probe import Support, ability

pytestmark = pytest.mark.tries

SEEN: list[int] = []
"""dimensions of the masks that attention was given"""


def padding_only(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal, with a mask [B, S] of padding, as FlashAttention has it."""
    SEEN.append(0 if attention_mask is None else attention_mask.ndim)
    groups, (width, slots) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    allowed = torch.ones(width, slots, dtype=torch.bool).tril(slots - width)
    if attention_mask is not None and attention_mask.ndim == 2:
        allowed = allowed & attention_mask[:, None, None, -slots:].bool()
    scores = (query @ key.mT * scaling).masked_fill(~allowed, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("padding_only", padding_only)
AttentionMaskInterface.register("padding_only", flash_attention_mask)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["lookup", "draft", "tree", "hybrid", "pearl"])
def test_attention_that_takes_no_mask_is_given_none(kind: str, rows: int) -> None:
    SEEN.clear()
    target, draft = models.llama(), models.llama(seed=3)
    for model in (target, draft):
        model.set_attn_implementation("padding_only")
    make: dict[str, Any] = {
        "lookup": PromptLookupDrafter,
        "draft": lambda: DraftModelDrafter(draft, num_draft_tokens=3),
        "tree": lambda: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=2),
        "hybrid": lambda: HybridDrafter(draft),
        "pearl": lambda: PearlDrafter(draft, window=3, worker="thread"),
    }
    options: dict[str, Any] = {**models.prompts([7, 4][:rows]), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**options)
    drafter = make[kind]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(target.generate(**options, assistant_model=drafter), plain)
    assert set(SEEN) <= {0, 2}
    assert drafter.last_stats.mode in ("lockstep", "staggered") and drafter.last_stats.drafted_tokens > 0
    said = [str(warning.message) for warning in caught if issubclass(warning.category, SpeculationWarning)]
    assert all("does not accept custom masks" in one for one in said), said
    with pytest.raises(SpeculationError, match="does not accept custom masks"):
        BatchDecoder(target, None)


def spoilt() -> Any:
    model = models.llama()
    model.get_output_embeddings().weight.data.fill_(float("nan"))
    return model


def raising() -> Any:
    model = models.llama()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("not today")

    model.forward = forward
    return model


def coarse() -> Any:
    """Activations are rounded by the largest of a forward, as int8 layers do it: tokens depend on their neighbours."""
    model = models.llama()

    def rounded(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        step = args[0].abs().max() / 7
        return ((args[0] / step).round() * step,)

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(models.spy(rounded))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (spoilt, "logits that are NaN or infinite"),
        (raising, "raised ArithmeticError"),
        (coarse, r"gives different logits when several tokens are verified .*apart, and rounding explains"),
        (lambda: models.build("Mamba", "eager"), "keeps a state that cannot be rolled back"),
    ],
    ids=["nan", "raises", "int8", "state"],
)
def test_it_is_said_why_a_model_cannot_verify_or_draft(make: Any, why: str) -> None:
    model = make()
    assert ability(model).support <= Support.STATE
    assert re.search(why, ability(model).why)
    with pytest.raises(SpeculationError, match=why):
        models.llama().generate(**models.prompts([5]), assistant_model=DraftModelDrafter(model))


def test_a_model_that_cannot_verify_decodes_plainly_and_says_why() -> None:
    model, drafter = coarse(), PromptLookupDrafter()
    options: dict[str, Any] = {**models.prompts([7]), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="plain decoding: LlamaForCausalLM gives different logits"):
        text = model.generate(**options, assistant_model=drafter)
    assert torch.equal(text, model.generate(**options))
    assert "gives different logits" in drafter.last_stats.notes[0]


def test_a_model_that_can_do_everything_has_no_excuse() -> None:
    assert ability(models.llama()) == (Support.RAGGED, models.VOCAB, "")


@pytest.mark.parametrize("how", ["generate", "batch"])
def test_experts_decode_as_transformers_own_loop_has_them(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its switch, which does something on a GPU only, is on in all forwards but the prompt's."""
    model, on, seen = models.llama(), [False], []

    @contextmanager
    def switch() -> Iterator[None]:
        on[0] = True
        yield
        on[0] = False

    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = models.prompts([7])["input_ids"]
    monkeypatch.setattr(model, "_optimize_model_for_decode", switch, raising=False)
    model.register_forward_pre_hook(models.spy(lambda *_: seen.append(on[0])))
    models.probed(model)
    seen.clear()
    if how == "generate":
        model.generate(ids, assistant_model=PromptLookupDrafter(), **options)
    else:
        with BatchDecoder(model, PromptLookupDrafter()) as decoder:
            decoder.submit(ids, **options).result(60)
    assert seen[0] is False and len(seen) > 2 and all(seen[1:]) and on == [False]


@pytest.mark.set_times
@pytest.mark.parametrize("how", ["draft", "hybrid", "batch", "pearl"])
def test_a_drafts_experts_do_so_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, on, seen = models.llama(), models.build("Qwen3-MoE"), [False], []

    @contextmanager
    def switch() -> Iterator[None]:
        on[0] = True
        yield
        on[0] = False

    makes: dict[str, Any] = {
        "hybrid": lambda: HybridDrafter(draft, num_draft_tokens=3),
        "pearl": lambda: PearlDrafter(draft, window=3, worker="thread"),
    }
    make = makes.get(how, lambda: DraftModelDrafter(draft, num_draft_tokens=3))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    ids = models.prompts([7])["input_ids"]
    monkeypatch.setattr(draft, "_optimize_model_for_decode", switch)
    draft.register_forward_pre_hook(lambda *_: seen.append(on[0]))
    models.probed(draft)
    seen.clear()
    if how == "batch":
        with BatchDecoder(target, make()) as decoder:
            decoder.submit(ids, **options).result(60)
    else:
        target.generate(ids, assistant_model=make(), **options)
    assert seen[0] is False and len(seen) > 2 and all(seen[1:]) and on == [False]
