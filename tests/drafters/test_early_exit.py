"""The target's own first layers as a draft: lossless whatever they say, and without weights of their own."""

from typing import Any

import models
import pytest
import torch
from transformers import GenerationConfig

from hf_specdec import BatchDecoder, DraftModelDrafter, HybridDrafter, PearlDrafter, SpeculationError, early_exit

FAMILIES = ["Llama", "Qwen3", "Gemma3", "Phi-3", "OPT", "Mixtral", "GPT-NeoX"]


def target_of(name: str, layers: int = 4) -> Any:
    config = models.ARCHITECTURES[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return models.from_config(config, "eager")


def compiled() -> Any:
    model = target_of("Llama")
    model.model.compile(backend="eager")
    return model


def options(lengths: list[int], **more: Any) -> dict[str, Any]:
    return {**models.prompts(lengths), "max_new_tokens": 16, "pad_token_id": 0, "do_sample": False} | more


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]])
@pytest.mark.parametrize("kind", ["draft_model", "hybrid", "pearl"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_plains(name: str, kind: str, lengths: list[int]) -> None:
    target = target_of(name)
    plain = target.generate(**options(lengths))
    before = target.config.to_dict()
    more: dict[str, Any] = {"speculation_type": kind, "assistant_early_exit": 2}
    if kind == "pearl":
        more["speculation"] = {"worker": "thread"}
    assert torch.equal(target.generate(**options(lengths), **more), plain)
    assert target.config.to_dict() == before and len(target.get_decoder().layers) == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_it_says_what_a_shorter_model_says(name: str) -> None:
    target, shorter = target_of(name), target_of(name, 2)
    missing, unexpected = shorter.load_state_dict(target.state_dict(), strict=False)
    assert not missing and unexpected
    draft, ids = early_exit(target, 2), models.prompts([9])["input_ids"]
    torch.testing.assert_close(draft(ids).logits, shorter(ids).logits)
    mine = {id(weight) for weight in draft.parameters()}
    assert mine < {id(weight) for weight in target.parameters()}
    assert early_exit(target, 2) is draft and early_exit(target, 1) is not draft


def test_where_the_other_layers_add_nothing_all_is_accepted() -> None:
    target = target_of("Llama")
    for layer in target.model.layers[2:]:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data.zero_()
    drafter = DraftModelDrafter(early_exit(target, 2), num_draft_tokens=3)
    asked = options([9], max_new_tokens=13)
    assert torch.equal(target.generate(**asked, assistant_model=drafter), target.generate(**asked))
    assert (
        drafter.last_stats is not None and drafter.last_stats.accepted_tokens == drafter.last_stats.drafted_tokens > 0
    )


def test_a_config_asks_for_it_too() -> None:
    target = target_of("Llama")
    config = GenerationConfig(
        max_new_tokens=16, pad_token_id=0, do_sample=False, speculation_type="hybrid", assistant_early_exit=2
    )
    batch = models.prompts([9, 5])
    plain = target.generate(**batch, max_new_tokens=16, pad_token_id=0, do_sample=False)
    assert torch.equal(target.generate(**batch, generation_config=config), plain)
    assert config.assistant_early_exit == 2
    with BatchDecoder(target, None, generation_config=config, max_rows=2) as decoder:
        answer = decoder.submit(models.prompts([9])["input_ids"][0])
        assert answer.result() == plain[0, 9:].tolist()
    assert decoder.drafter is not None and decoder.drafter.config.drafter_type == "hybrid"


@pytest.mark.parametrize("layers", [0, 4, -1, True, 1.5])
def test_other_numbers_are_refused(layers: Any) -> None:
    target = target_of("Llama")
    with pytest.raises(SpeculationError, match="layers must be from 1 to 3"):
        early_exit(target, layers)


def test_what_has_no_layers_or_needs_none_is_refused() -> None:
    with pytest.raises(SpeculationError, match="cannot be left early"):
        early_exit(models.build("GPT-2"), 1)
    with pytest.raises(SpeculationError, match="cannot be left early"):
        early_exit(compiled(), 1)
    target = target_of("Llama")
    with pytest.raises(SpeculationError, match="drafts without a model"):
        target.generate(**options([9]), speculation_type="prompt_lookup", assistant_early_exit=2)
    for drafter in (HybridDrafter(early_exit(target, 1)), PearlDrafter(early_exit(target, 1), worker="thread")):
        with pytest.raises(SpeculationError, match="assistant_early_exit=2"):
            target.generate(**options([9]), assistant_model=drafter, assistant_early_exit=2)
