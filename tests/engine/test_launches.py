"""What the host launches in a round beside the forwards that a GPU replays: few operations, whatever is drafted.

Counted on a CPU, where a replay is a run of the same step.
"""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from counting import Launches
from head_pairs import PAIRS, drafting_goes_on
from stream_models import never_paused, streams_of, target_of
from toy_drafters import Future, bushy

from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from hf_specdec.target.recorded import RecordedSteps

__all__ = ["drafting_goes_on"]
NEW = 120
MOST = 40
"""launches a round; plain decoding of a model of 32 layers has some 600 in each forward"""


def bush() -> tuple[Any, Any]:
    """Nearly each round keeps a path that does not lie at the front of its tree: in every layer it is moved."""
    model = models.llama(num_hidden_layers=16)
    said = model.generate(**models.prompts([9]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return model, bushy(Future(said), 3, models.VOCAB)


SIDES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "lookup": lambda: (models.llama(), PromptLookupDrafter()),
    "fixed": lambda: (model := models.llama(), DraftModelDrafter(model, num_draft_tokens=4)),
    "hybrid": lambda: (model := models.llama(), HybridDrafter(model)),
    "tree, 16 layers": bush,
    "MTP": PAIRS["GLM-4-MoE, 3"],
    "DFlash": PAIRS["DFlash, mixed"],
    "streams": lambda: (model := target_of("Llama"), streams_of(model, num_nodes=3, copies=False)),
}
"""a target, and a drafter for it"""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted, run = Launches(), RecordedSteps.run

    def inside(self: RecordedSteps, key: Any, step: Callable[[], Any]) -> Any:
        with counted.apart():
            return run(self, key, step)

    monkeypatch.setattr(RecordedSteps, "run", inside)
    return counted


@pytest.mark.parametrize("kind", SIDES)
def test_a_round_launches_little_beside_its_forwards(
    kind: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's forward, and what a call begins and ends with, are counted with the second of two lengths less the
    first."""
    never_paused(monkeypatch)  # random streams would be given up
    (model, drafter), met = SIDES[kind](), []
    call = {"do_sample": False, "pad_token_id": 0, "speculation": {"forwards": "captured"}, "assistant_model": drafter}
    for new in (8, 8, NEW):
        launches.met.clear()
        with launches, torch.no_grad():
            model.generate(**models.prompts([9]), max_new_tokens=new, **call)
        met.append((sum(launches.met.values()), drafter.last_stats.target_calls))
    (before, few), (after, many) = met[1:]
    a_round = (after - before) / (many - few)
    print(f"{kind}: {a_round:.0f} launches a round")
    assert a_round <= MOST, launches.met.most_common(12)
