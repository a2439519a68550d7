"""Adapters of PEFT on the target: a forward and inputs of its own; and streams' LoRA as one of them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides
from stream_models import streams_of

from hf_specdec import SpeculationError

peft = pytest.importorskip("peft")


def lora() -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def virtual_tokens() -> Any:
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
@pytest.mark.parametrize("config", [lora, virtual_tokens])
def test_the_text_is_plains(config: Any, lengths: list[int]) -> None:
    model = peft.get_peft_model(models.llama(), config()).eval()
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(), sides.plain)
    if config is lora:
        assert sides.stats.accepted_tokens > 0


def test_each_row_with_an_adapter_of_its_own() -> None:
    """PEFT's hooks of such a call know its rows, none of which may leave."""
    model = peft.get_peft_model(models.llama(), lora(), "a")
    model.add_adapter("b", lora())
    model.eval()
    sides = Sides(model, [9, 5], adapter_names=["a", "b"], eos_token_id=5)
    for _ in range(2):
        assert torch.equal(sides.ours(), sides.plain)
        plain = model.generate(**sides.prompts, max_new_tokens=8, do_sample=False)  # nothing stays behind
        drafted = model.generate(**sides.prompts, max_new_tokens=8, do_sample=False, assistant_model=sides.drafter)
        assert torch.equal(drafted, plain)


def test_what_tuned_streams_learned_is_an_adapter(tmp_path: Path) -> None:
    """PEFT's target and the one that was tuned have the same logits, which are not the plain target's."""
    target = models.llama()
    drafter = streams_of(target, 1, mode="tuned")
    drafter.save_lora(tmp_path, target)
    adapted = peft.PeftModel.from_pretrained(deepcopy(target), tmp_path).eval()
    inputs = models.prompts([7, 5])
    with torch.no_grad():
        before, found = target(**inputs).logits, adapted(**inputs).logits
        drafter.tune(target)
        tuned = target(**inputs).logits
    torch.testing.assert_close(found, tuned, atol=1e-4, rtol=1e-4)
    assert (before - tuned).abs().max() > 0.01
    with pytest.raises(SpeculationError, match="there is no LoRA"):
        streams_of(target, 1).save_lora(tmp_path, target)
