"""A recording reads by address: whatever a step has not made itself must outlive the call."""

import gc
import weakref
from typing import Any

import models
import pytest
import torch
from captured_calls import CAPTURED, DRAFTERS, decode
from head_pairs import PAIRS, drafting_goes_on
from stream_models import never_paused, streams_of, target_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_specdec
from hf_specdec import PromptLookupDrafter, SpeculationWarning
from hf_specdec.target import recorded, shelf
from hf_specdec.target.lasting import on_lasting_thread
from hf_specdec.target.recorded import RecordedSteps
from hf_specdec.target.shelf import shelf_of

pytestmark = pytest.mark.real_time
__all__ = ["drafting_goes_on"]
HEADS = ["GLM-4-MoE, 3", "DFlash, mixed"]


class Looking(TorchDispatchMode):
    """Notes the storages that operations read and that none of them has made."""

    def __init__(self, read: dict[int, tuple[StorageWeakRef, str]]) -> None:
        super().__init__()
        self.read, self.made = read, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {storage._cdata for storage in self.made}
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and value.numel() and (key := value.untyped_storage()._cdata) not in own:
                ref = StorageWeakRef(value.untyped_storage())
                self.read.setdefault(key, (ref, f"{func} of {tuple(value.shape)}"))
        output = func(*args, **(kwargs or {}))
        self.made += [value.untyped_storage() for value in tree_leaves(output) if isinstance(value, Tensor)]
        return output


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[StorageWeakRef, str]]:
    """What steps of the test have read that would be recorded, or replayed: met before by the same buffers."""
    read: dict[int, tuple[StorageWeakRef, str]] = {}
    met: set[tuple[int, Any]] = set()

    def run(self: RecordedSteps, key: Any, step: Any) -> Any:
        if (which := (id(self), key)) not in met:
            met.add(which)
            return step()
        with Looking(read):
            return step()

    monkeypatch.setattr(RecordedSteps, "run", run)
    monkeypatch.setattr(shelf, "_shelves", weakref.WeakKeyDictionary())
    return read


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]])
@pytest.mark.parametrize("kind", ["lookup, branches", "fixed", "candidates", "hybrid", "streams", *HEADS])
def test_what_is_read_stays(
    kind: str, lengths: list[int], read: dict[int, tuple[StorageWeakRef, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = models.llama(), models.llama(seed=1)
    if kind in HEADS:
        model, drafter = PAIRS[kind]()
    elif kind == "streams":
        drafter = streams_of(model := target_of("Llama"), num_nodes=3)
        never_paused(monkeypatch)
    else:
        drafter = DRAFTERS[kind](draft)
    decode(model, drafter, lengths, speculation=CAPTURED)
    assert len(read) > 20
    gc.collect()
    assert not [what for ref, what in read.values() if ref.expired()]
    assert shelf.shelf_of(model).kept, "which is what holds them"


def test_recordings_that_fail_leave_their_buffers_at_once() -> None:
    """Nobody waits for the garbage collector, least of all where memory is short."""
    model, held = models.llama(), []

    class Failing:
        def __init__(self, device: torch.device) -> None:
            """Nothing to prepare."""

        def __call__(self, step: Any) -> Any:
            return on_lasting_thread(lambda: 1 / 0)

    with pytest.MonkeyPatch.context() as patch, pytest.warns(SpeculationWarning, match="not recorded"):
        patch.setitem(recorded.RECORDERS, "cpu", Failing)
        gc.disable()
        try:
            for _ in range(4):
                drafter = PromptLookupDrafter()
                decode(model, drafter, [9], speculation={"forwards": "captured"})
                held.append(drafter.last_stats.held_bytes)
        finally:
            gc.enable()
    assert len(set(held)) == 1 and held[0] > 0


def test_release_finds_what_is_inside_another_model() -> None:
    model, drafter = models.llama(), PromptLookupDrafter()
    decode(model, drafter, [9], speculation={"forwards": "captured"})
    around = torch.nn.Sequential(model)
    assert shelf_of(model).kept
    hf_specdec.release(around)
    assert not shelf_of(model).kept
