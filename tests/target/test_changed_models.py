"""A model that was changed behind a first call is found out anew: drafted text is what plain decoding says now."""

from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
import transformers as tf
from compare import PROMPTS, Sides
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec import BatchDecoder, DraftModelDrafter, HybridDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.target import fingerprint, probe
from hf_specdec.target.attention import is_stock
from hf_specdec.target.probe import Support, ability

Change = Callable[[Any, pytest.MonkeyPatch], None]
NEW: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def steered(where: Any) -> Change:
    def change(model: Any, _: pytest.MonkeyPatch) -> None:
        def hook(module: Any, args: Any, output: Any) -> Any:
            states = (output[0] if isinstance(output, tuple) else output).clone()
            states[:, where] += 2
            return (states, *output[1:]) if isinstance(output, tuple) else states

        model.model.layers[0].register_forward_hook(hook)

    return change


def quantized(model: Any, _: pytest.MonkeyPatch) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def own_mask(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Far keys are not seen: further than the probe's text is long."""
    stock = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def near(*args: Any, **options: Any) -> Any:
        rule = options["mask_function"]
        options |= {"mask_function": lambda b, h, q, k: rule(b, h, q, k) & (k > q - 12), "allow_is_causal_skip": False}
        return stock(*args, **options)

    patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", near)


def masks_made_otherwise(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The function that its file calls to make masks was replaced."""
    stock = modeling_llama.create_causal_mask

    def shifted(*args: Any, **options: Any) -> Any:
        return stock(*args, **options, and_mask_function=lambda b, h, q, k: k > q - 12)

    patch.setattr(modeling_llama, "create_causal_mask", shifted)


def attention(register: bool) -> Change:
    def change(model: Any, patch: pytest.MonkeyPatch) -> None:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def own(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            key, value = key.clone(), value.clone()
            key[:, 0, 1:3], value[:, 0, 1:3] = 0, 0  # some keys of one head are taken out
            return stock(module, query, key, value, mask, **options)

        mapping = AttentionInterface._global_mapping if register else ALL_ATTENTION_FUNCTIONS._local_mapping
        patch.setitem(mapping, "sdpa", own)

    return change


def resized(size: int) -> Change:
    def change(model: Any, _: pytest.MonkeyPatch) -> None:
        model.resize_token_embeddings(size)
        torch.manual_seed(3)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_()
            model.get_output_embeddings().weight.normal_()

    return change


def fewer_layers(model: Any, _: pytest.MonkeyPatch) -> None:
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1


def rotated_otherwise(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Every Llama's class has another forward: keys see what comes behind them in the same forward."""
    stock = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return stock(self, x + x.mean(1, keepdim=True))

    patch.setattr(modeling_llama.LlamaMLP, "forward", forward)


def forgets_keys(model: Any, _: pytest.MonkeyPatch) -> None:
    """As remote code with gradient checkpointing does: a forward of the whole text each time."""
    model.gradient_checkpointing_enable()
    model.train()
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0


class Int8(nn.Module):
    """As LLM.int8: where any token is loud in a column, all are multiplied in full precision there."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.in_features = linear.weight, linear.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rough = (self.weight * 16).round() / 16
        loud = (x.abs() > 20).flatten(0, -2).any(0)
        return nn.functional.linear(x, torch.where(loud, self.weight, rough))


def int8_layers(model: Any, _: pytest.MonkeyPatch) -> None:
    """Only tokens that the probe does not feed are loud."""
    model.model.embed_tokens.weight.data[60:] *= 30
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8(layer.mlp.up_proj)


CHANGES: dict[str, Change] = {
    "steering of the last token": steered(-1),
    "steering of all tokens": steered(slice(None)),
    "quantized in place": quantized,
    "own mask function": own_mask,
    "masks made otherwise": masks_made_otherwise,
    "own attention, registered": attention(True),
    "own attention, set": attention(False),
    "more tokens": resized(130),
    "fewer tokens": resized(80),
    "fewer layers": fewer_layers,
    "another class": rotated_otherwise,
    "checkpointing": forgets_keys,
    "int8": int8_layers,
}


@pytest.fixture
def drafters() -> dict[str, Any]:
    draft = models.llama(num_hidden_layers=1)
    return {
        "lookup": PromptLookupDrafter(),
        "hybrid": HybridDrafter(draft),
        "draft model": DraftModelDrafter(draft, num_draft_tokens=4),
    }


def repeated(lengths: list[int], vocab: int = 80) -> dict[str, Any]:
    """Prompts that say everything three times, so that lookup drafts."""
    once = models.prompts([max(lengths)] * len(lengths), vocab)["input_ids"]
    ids = once.repeat(1, 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("called", [True, False], ids=["after a call", "before any"])
@pytest.mark.parametrize("change", CHANGES)
def test_text_is_plains(change: str, called: bool, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    before = {rows: model.generate(**repeated([9] * rows), **NEW) for rows in (1, 3)}
    if called:
        for rows in (1, 3):
            for drafter in drafters.values():
                drafted = model.generate(**repeated([9] * rows), **NEW, assistant_model=drafter)
                assert torch.equal(drafted, before[rows])
    CHANGES[change](model, monkeypatch)
    for rows in (1, 3):
        plain = model.generate(**repeated([9] * rows), **NEW)
        if change != "checkpointing":
            assert not torch.equal(plain, before[rows]), "the change changes nothing"
        for kind, drafter in drafters.items() if change != "another class" else [("lookup", drafters["lookup"])]:
            for more in ({}, {"do_sample": True, "top_k": 1}):
                drafted = model.generate(**repeated([9] * rows), **NEW | more, assistant_model=drafter)
                assert torch.equal(drafted, plain), (kind, rows, more)


def test_a_change_that_was_undone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = models.llama(), PromptLookupDrafter()
    prompts = repeated([9])
    plain = model.generate(**prompts, **NEW)

    def mode() -> str:
        assert torch.equal(model.generate(**prompts, **NEW, assistant_model=drafter), plain)
        assert drafter.last_stats is not None
        return drafter.last_stats.mode

    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert mode() == "plain" and "forward hook (test_a_change" in drafter.last_stats.notes[0]
    handle.remove()
    assert mode() != "plain"
    with monkeypatch.context() as patch:
        own_mask(model, patch)
        model.generate(**prompts, **NEW, assistant_model=drafter)
        assert "masks by a function that is not transformers' own" in ability(model).why
    assert mode() != "plain" and ability(model).support is Support.RAGGED


def test_a_hook_may_say_that_it_sees_any_forward() -> None:
    sides = Sides(models.llama(), [9])
    sides.model.register_forward_hook(models.spy(lambda *_: None))
    assert torch.equal(sides.ours(), sides.plain) and sides.stats.accepted_tokens


@pytest.mark.grid
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_model_that_only_generates_is_not_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plain calls nor drafted ones, hidden states or texts past a rotary limit change what it is known by."""
    model = models.build(name, "eager")
    tried, stock = [], probe._probe
    monkeypatch.setattr(probe, "_probe", lambda of: tried.append(of) or stock(of))
    drafter = PromptLookupDrafter()
    for more in ({}, {"output_hidden_states": True, "return_dict_in_generate": True}, {}):
        for assistant in (drafter, None, drafter):
            model.generate(**models.prompts([9]), **NEW, assistant_model=assistant, **more)
    assert len(tried) <= 1


def test_numbers_that_forwards_change_do_not_count() -> None:
    model = models.llama()
    model.model.calls, stock = 0, model.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        model.model.calls += 1
        return stock(*args, **kwargs)

    model.model.forward = counting
    ability(model)
    before, again = model.model.calls, ability(model)
    assert model.model.calls == before and again.support is Support.RAGGED
    model.model.layers[0].register_forward_hook(lambda *_: None)
    ability(model)
    assert model.model.calls > before


def test_what_a_structure_is_made_of() -> None:
    """Each of these is another model; the same one, looked at twice, is not."""
    model = models.llama()
    seen = {fingerprint.structure(model)}
    assert fingerprint.structure(model) in seen

    def other() -> None:
        now = fingerprint.structure(model)
        assert now not in seen
        seen.add(now)

    for change in (
        lambda: model.train(),
        lambda: setattr(model.model.norm, "variance_epsilon", 0.1),
        lambda: model.set_attn_implementation("eager"),
        lambda: model.half(),
        lambda: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
        lambda: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: model.model.layers.append(nn.Identity()),
    ):
        change()
        other()
    nn.modules.module._global_forward_hooks.clear()
    before = fingerprint.fingerprint(model)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    other_place = fingerprint.fingerprint(model)
    assert other_place != before


@pytest.mark.parametrize("change", ["more tokens", "steering of all tokens", "quantized in place"])
def test_a_batch_decoder_notices(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = models.llama(), models.prompts([9])["input_ids"]
    with BatchDecoder(model, PromptLookupDrafter()) as decoder:
        assert decoder.submit(ids, **NEW).result(60)
        CHANGES[change](model, monkeypatch)
        with pytest.raises(SpeculationError, match="was changed after this BatchDecoder was created"):
            decoder.submit(ids, **NEW)


def test_a_batch_decoder_does_not_step_around_a_generate_of_the_models_own() -> None:
    class Own(tf.LlamaForCausalLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    with pytest.raises(SpeculationError, match=r"has a generate of its own; use model\.generate"):
        BatchDecoder(Own(models.llama().config), PromptLookupDrafter())


@pytest.fixture
def own_attention() -> Iterator[list[str]]:
    """Calls of a function that is set, and deleted again, during drafted calls."""
    yield []
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)


@pytest.mark.parametrize("lengths", [[9], PROMPTS])
def test_an_attention_of_ones_own_leaves_with_its_owner(lengths: list[int], own_attention: list[str]) -> None:
    stock, sides = ALL_ATTENTION_FUNCTIONS["sdpa"], Sides(models.llama(), lengths)

    def own(*args: Any, **options: Any) -> Any:
        own_attention.append("called")
        return stock(*args, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    assert torch.equal(sides.ours(), sides.plain) and own_attention
    del ALL_ATTENTION_FUNCTIONS["sdpa"]
    own_attention.clear()
    for drafter in (None, sides.drafter):
        assert torch.equal(sides.run(assistant_model=drafter), sides.plain) and not own_attention
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock and is_stock(stock)
    hf_specdec.unregister()
    try:
        assert torch.equal(sides.run(), sides.plain) and not own_attention
    finally:
        hf_specdec.register()


def test_a_default_device_that_is_not_the_models_changes_nothing() -> None:
    model, prompts = models.llama(), models.prompts(PROMPTS)
    plain = model.generate(**prompts, **NEW)
    several = (PromptLookupDrafter(), HybridDrafter(models.llama(num_hidden_layers=1)))
    torch.set_default_device("meta")
    try:
        for drafter in several:
            drafted = model.generate(**prompts, **NEW | {"do_sample": True, "top_k": 1}, assistant_model=drafter)
            assert torch.equal(drafted, plain)
    finally:
        torch.set_default_device(None)
