"""Greedy text in float32 is plain decoding's, over ten families of models and one with a recurrent state."""

import warnings

import models
import pytest
import torch
import toy_drafters as drafters
from compare import Sides, sequences_of
from every_drafter import drafting_goes_on
from place import DEVICE, synchronize

from hf_specdec import SpeculationWarning

FAMILIES = [
    "Llama",
    "Qwen2 sliding",
    "Qwen3",
    "Gemma2",
    "Gemma3",
    "Phi-3",
    "GPT-2",
    "Mixtral",
    "DeepSeek-V3",
    "Bloom",
    "LFM2",
]
ROW_BY_ROW = ("Bloom", "LFM2")
"""families of which a batch of uneven rows may run plainly, and says so"""


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_plains(family: str, lengths: list[int]) -> None:
    model = models.build(family, "eager" if family in ("Bloom", "Gemma2") else "sdpa").to(DEVICE)
    try:
        sides = Sides(model, lengths)
    except Exception as error:
        synchronize()
        pytest.skip(f"plain generate itself fails: {error}")
    future = drafters.Future(sequences_of(sides.plain))
    with drafting_goes_on(), warnings.catch_warnings():
        if family in ROW_BY_ROW and len(lengths) > 1:
            warnings.simplefilter("ignore", SpeculationWarning)
        for drafter in (sides.drafter, drafters.bushy(future, 5, models.VOCAB)):
            assert torch.equal(sides.ours(drafter), sides.plain)
            assert drafter.last_stats is None or drafter.last_stats.accepted_tokens, "nothing was accepted"
