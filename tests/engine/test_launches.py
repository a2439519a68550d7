"""What the host launches in a round beside the forwards that a GPU replays: few operations, whatever is drafted.

Views launch nothing. Counted on a CPU, where a replay is a run of the same step.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from head_pairs import PAIRS, drafting_goes_on
from stream_models import never_paused, streams_of, target_of
from torch.utils._python_dispatch import TorchDispatchMode
from toy_drafters import Future, bushy

from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from hf_specdec.target.recorded import RecordedSteps

__all__ = ["drafting_goes_on"]
VIEWS = {
    "alias", "as_strided", "detach", "empty", "expand", "lift_fresh", "permute", "select", "slice", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
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


class Launches(TorchDispatchMode):
    """Counts operations outside recorded steps."""

    def __init__(self) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if not self.inside and name not in VIEWS:
            self.met[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counted, run = Launches(), RecordedSteps.run

    def inside(self: RecordedSteps, key: Any, step: Callable[[], Any]) -> Any:
        counted.inside += 1
        try:
            return run(self, key, step)
        finally:
            counted.inside -= 1

    monkeypatch.setattr(RecordedSteps, "run", inside)
    yield counted


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
