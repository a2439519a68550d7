"""A bad drafter costs time only, on a GPU, too: nothing that it says reaches a kernel whose assertion would end the
process. After each, the device answers, and plain decoding says what it said before."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import PROMPTS, Sides
from draft_faults import FAULTS, changed, run_with_one_warning
from place import DEVICE, synchronize
from toy_drafters import Draft

BATCHES = pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "four rows"])
CHOSEN = [
    "raises",
    "ids too large",
    "ids far too large",
    "negative ids",
    "one bad id",
    "ids as floats",
    "lengths too long",
    "NaN q",
    "infinite q",
    "q above 1",
    "q of another shape",
    "parents after children",
    "columns beyond the lengths",
]
MAY_BE_PUT_UP_WITH = {"columns beyond the lengths"}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama().to(DEVICE)


def on_device(fault: Callable[[Draft], Any]) -> Callable[[Draft], Any]:
    """The same lie told by tensors that lie where the target does."""

    def told(draft: Draft) -> Any:
        draft = fault(draft)
        fields = {name: value.to(DEVICE) for name, value in vars(draft).items() if isinstance(value, torch.Tensor)}
        return changed(draft, **fields)

    return told


@BATCHES
@pytest.mark.parametrize("fault", CHOSEN)
@pytest.mark.filterwarnings("default::hf_specdec.errors.SpeculationWarning")
def test_the_device_survives(model: Any, fault: str, lengths: list[int]) -> None:
    """Greedy, and by draws of which only one can come out."""
    sides = Sides(model, lengths, gamma=3)
    for lie in (FAULTS[fault], on_device(FAULTS[fault])):
        for draws in ({}, {"do_sample": True, "top_k": 1, "temperature": 0.5}):
            bad = drafters.faulty(sides.drafter, 1, lie)
            text = run_with_one_warning(sides, bad, at_most=fault in MAY_BE_PUT_UP_WITH, **draws)
            synchronize()
            assert torch.equal(text, sides.plain)
    assert torch.equal(sides.run(), sides.plain)


def asks_for_too_much(draft: Draft) -> Draft:
    torch.empty(1 << 60, dtype=torch.uint8, device=DEVICE)
    return draft


@pytest.mark.filterwarnings("default::hf_specdec.errors.SpeculationWarning")
def test_a_drafter_that_runs_out_of_memory(model: Any) -> None:
    sides = Sides(model, PROMPTS, gamma=3)
    bad = drafters.faulty(sides.drafter, 1, asks_for_too_much)
    assert torch.equal(run_with_one_warning(sides, bad), sides.plain)
    synchronize()
    assert torch.equal(sides.run(), sides.plain)
