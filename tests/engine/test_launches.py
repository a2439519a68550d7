"""What the host launches in a round beside the forwards that a GPU replays: few operations, whatever is drafted; and
how many of their slots are used.

Counted on a CPU, where a replay is a run of the same step.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from close_drafts import nearly
from counting import Launches
from head_pairs import PAIRS, drafting_goes_on
from simulated import Device
from stream_models import never_paused, streams_of, target_of
from toy_drafters import Future, bushy

from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from hf_specdec.budget import Cost
from hf_specdec.target.buffers import WIDTHS
from hf_specdec.target.captured import CapturedRunner
from hf_specdec.target.recorded import RecordedSteps

__all__ = ["drafting_goes_on"]
NEW = 120
MOST, OF_HEADS = 12, 24
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
DRAFTING = {"draft model": DraftModelDrafter, "hybrid": HybridDrafter}
"""drafters, of a draft model that is often right"""


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
    for new in (8, 8, 8, NEW):
        launches.met.clear()
        with launches, torch.no_grad():
            model.generate(**models.prompts([9]), max_new_tokens=new, **call)
        met.append((sum(launches.met.values()), drafter.last_stats.target_calls))
    (before, few), (after, many) = met[2:]
    a_round = (after - before) / (many - few)
    print(f"{kind}: {a_round:.0f} launches a round")
    assert a_round <= (OF_HEADS if kind in ("MTP", "DFlash", "streams") else MOST), launches.met.most_common(12)


@pytest.mark.parametrize("kind", DRAFTING)
def test_a_drafted_round_is_two_graphs_and_two_waits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's forward, with all that is found there, and the draft's chain: each is told what to do in one
    transfer, and waited for once at most."""
    monkeypatch.setattr(Cost, "round", lambda *_: lambda width: 1.0 + 0.002 * width)
    model, counts = models.llama(), list[Counter[str]]()
    drafter, device = DRAFTING[kind](nearly(model)), Device(model)
    call = {"do_sample": False, "pad_token_id": 0, "speculation": {"forwards": "captured"}, "assistant_model": drafter}
    for new in (NEW // 2, 8, NEW // 2):
        device.met.clear()
        with device.simulated(), torch.no_grad():
            model.generate(**models.prompts([9]), max_new_tokens=new, **call)
        counts.append(Counter(device.met, rounds=drafter.last_stats.target_calls))
    rounds = counts[2]["rounds"] - counts[1]["rounds"]
    names = ("launches", "graphs", "eager", "reads", "writes")
    a_round = {name: (counts[2][name] - counts[1][name]) / rounds for name in names}
    tokens = drafter.last_stats.mean_acceptance_length
    print(f"{kind}, {tokens:.1f} tokens a round: {', '.join(f'{n:.1f} {name}' for name, n in a_round.items())}")
    assert drafter.last_stats.draft_calls > 2 * rounds and a_round["launches"] <= MOST
    assert max(a_round["graphs"], a_round["reads"]) < 2.5 and a_round["writes"] < 3, a_round


WIDE: dict[str, Callable[[Any], Any]] = {
    "a window of 64": lambda draft: DraftModelDrafter(draft, num_draft_tokens=64),
    "hybrid": HybridDrafter,
    "hybrid, a window of 64": lambda draft: HybridDrafter(draft, num_draft_tokens=64),
}
"""drafters, of a draft model that is always right"""


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", WIDE)
def test_no_round_is_wider_than_what_is_recorded(
    kind: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node more than fits would cost as much as all up to the next width."""
    model, fed, met = models.llama(), CapturedRunner._fed, Counter[int]()
    drafter = WIDE[kind](models.llama())

    def counted(self: CapturedRunner, tokens: Any, *given: Any, **named: Any) -> Any:
        met[len(tokens[0])] += self.model is model
        return fed(self, tokens, *given, **named)

    monkeypatch.setattr(CapturedRunner, "_fed", counted)
    call = {"do_sample": False, "pad_token_id": 0, "speculation": {"forwards": "captured"}, "max_new_tokens": 400}
    model.generate(**models.prompts(lengths), **call, assistant_model=drafter)
    met = +met  # the draft's reading is not counted
    used = sum(width * count for width, count in met.items())
    slots = sum(min(each for each in WIDTHS if each >= width) * count for width, count in met.items())
    print(f"{kind}, {len(lengths)} rows: {used} of {slots} slots used, rounds by width {dict(sorted(met.items()))}")
    assert max(met) <= WIDTHS[-1] and (kind == "hybrid" or WIDTHS[-1] in met)
