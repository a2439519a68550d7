"""Adapters of PEFT on the target: a forward and inputs of its own."""

from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides

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
