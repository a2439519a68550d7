"""Heads that read the target's states: MTP layers, DFlash models and EAGLE-3 heads, in batches of uneven rows, drawn
losslessly."""

from typing import Any

import models
import pytest
import torch
import transformers as tf
from dflash_models import dflash
from head_pairs import LENGTHS, PAIRS, SMALL, drafting_goes_on, small
from heads_alone import drafts_are_those_of_texts_alone
from mtp_heads import TARGETS, mtp, save_with_layers
from sampled_triples import FEWER, LEVEL, SETTINGS, joint, p_value, sample

from hf_specdec import DFlashDrafter, Drafter, MtpDrafter, SpeculationError

__all__ = ["drafting_goes_on", "small"]


@pytest.mark.grid
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_is_the_targets(pair: str, lengths: list[int]) -> None:
    target, drafter = PAIRS[pair]()
    inputs = models.prompts(lengths) | {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)
    # Rows end at different times.
    inputs["eos_token_id"] = int(plain[0, -12])
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_are_those_of_the_heads_over_each_text_alone(
    pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts_are_those_of_texts_alone(pair, lengths, monkeypatch, "eager")


@pytest.mark.grid
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
@pytest.mark.parametrize("kind", SMALL)
def test_sampled_text_has_the_targets_distribution(small: Any, kind: str, settings: str) -> None:
    """The power is that of test_distribution's tests."""
    told, processors = SETTINGS[settings]
    drafter = SMALL[kind](small)
    counts = sample(small, drafter, FEWER, **told)
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_come_from_the_targets_checkpoint(layers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = mtp("GLM-4-MoE", layers)
    # transformers tells the layers by the numbers that they have in the models of that family.
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9].*"])
    save_with_layers(target, model, tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = models.prompts([9]) | {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = target.generate(**inputs)
    assert torch.equal(loaded.generate(**inputs, speculation_type="mtp"), plain)
    drafter, given = MtpDrafter(), MtpDrafter(model)
    for _ in range(2):
        loaded.generate(**inputs, assistant_model=drafter)
    target.generate(**inputs, assistant_model=given)
    assert drafter.last_stats is not None and given.last_stats is not None
    assert drafter.last_stats.accepted_tokens == given.last_stats.accepted_tokens


def test_a_dflash_model_is_saved_and_loaded(tmp_path: Any) -> None:
    target, model = dflash("mixed")
    DFlashDrafter(model).save_pretrained(tmp_path, target=target)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, DFlashDrafter)
    inputs = models.prompts([9]) | {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, assistant_model=loaded), target.generate(**inputs))


def test_what_cannot_be_served() -> None:
    target, model = models.llama(), models.llama(seed=1)
    ids = models.prompts([5])
    with pytest.raises(SpeculationError, match="has no layers for multi-token prediction"):
        target.generate(**ids, assistant_model=MtpDrafter(), max_new_tokens=3)
    with pytest.raises(SpeculationError, match="must be transformers' MtpModel, got LlamaForCausalLM"):
        MtpDrafter(model)
    with pytest.raises(SpeculationError, match="LlamaForCausalLM is not a DFlash model"):
        DFlashDrafter(model)
    with pytest.raises(SpeculationError, match="reads states of width 32"):
        models.llama(hidden_size=64).generate(**ids, assistant_model=DFlashDrafter(dflash("mixed")[1]))
    without = models.from_config(TARGETS["GLM-4-MoE"](1))
    with pytest.raises(SpeculationError, match="holds no layers for multi-token prediction"):
        without.generate(**ids, assistant_model=MtpDrafter(), max_new_tokens=3)
