"""A static cache that is asked for is served, whatever layers it has; where it is not, what it lacks is said."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import Sides
from transformers import StaticCache

from hf_specdec import PromptLookupDrafter, SpeculationWarning

FULL = ["Llama", "GPT-2"]
MIXED = ["Mistral", "Qwen2 sliding", "Gemma2", "Gemma3", "Phi-3", "GPT-OSS", "Qwen3-Next", "LFM2"]


@pytest.mark.parametrize("lengths", [[7], [9, 5]], ids=str)
@pytest.mark.parametrize("name", [*FULL, *MIXED])
def test_a_static_cache_that_is_asked_for(name: str, lengths: list[int]) -> None:
    static = {"cache_implementation": "static", "disable_compile": True}
    sides = Sides(models.build(name, "eager"), lengths, **static, max_new_tokens=16)
    for drafter in (drafters.noisy(drafters.Future(sides.plain), 4, models.VOCAB), PromptLookupDrafter()):
        assert torch.equal(sides.ours(drafter), sides.plain)
        assert drafter.last_stats.mode != "plain"


@pytest.mark.parametrize("name", MIXED)
def test_one_that_is_kept_is_filled_by_plain_decoding(name: str) -> None:
    model = models.build(name, "eager")
    with pytest.warns(SpeculationWarning, match="a static cache with sliding or recurrent layers cannot be"):
        assert_plain(model, past_key_values=StaticCache(config=model.config, max_cache_len=64))


def test_what_other_caches_lack() -> None:
    model = models.build("Llama")
    with pytest.warns(SpeculationWarning, match="a cache that can be rolled back, and this call uses no cache"):
        assert_plain(model, use_cache=False)


def assert_plain(model: Any, **options: Any) -> None:
    told: dict[str, Any] = {**models.prompts([7]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**told)
    drafter = PromptLookupDrafter()
    assert torch.equal(model.generate(**told, **options, disable_compile=True, assistant_model=drafter), plain)
    assert drafter.last_stats.mode == "plain"
