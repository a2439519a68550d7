"""The host waits for a GPU as often as was counted on the CPU: torch itself says where it waits.

`torch.cuda.set_sync_debug_mode("warn")` warns of each waiting read, and of each write from memory that is not pinned.
The dry run on a CPU counts as `tests/engine/test_transfers.py` does.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import models
import pytest
import torch
import transformers
from counted_rounds import BATCHES, DRAFTERS, NEW, VOCAB, allowed, rounds
from every_drafter import PAIRS, drafting_goes_on
from place import DEVICE
from steps import note

from hf_specdec import SpeculationWarning
from hf_specdec.drafters.draft_model.model import ModelOverCache
from hf_specdec.engine.generation import Generation

OF_TRANSFORMERS = str(transformers.__path__[0])
HELD_TO = [kind for kind in DRAFTERS if kind != "ngram"]
"""drafters of which a round is held to what was counted on a CPU; of the others it is told only"""


@contextmanager
def waits_counted() -> Iterator[Counter[str]]:
    """By place, those of this thread: PEARL's worker waits for itself."""
    counts: Counter[str] = Counter()
    here = threading.get_ident()

    def heard(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if issubclass(category, SpeculationWarning):
            raise category(message)  # a drafter was dropped
        if "synchronizing CUDA operation" in str(message) and threading.get_ident() == here:
            ours = not filename.startswith(OF_TRANSFORMERS)
            counts["ours" if ours else "transformers'"] += 1
            counts[f"{'/'.join(filename.split('/')[-3:])}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = heard
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on_a_gpu(kind: str, batch: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """What each round of a second call waited for; the first one has met every kernel."""
    counted: list[Counter[str]] = []
    play, opened = Generation.play_round, ModelOverCache.__init__

    def opening(self: Any, *args: Any, **known: Any) -> None:
        """The draft model reads the prompt when it is needed first, once a call: that is not counted."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            opened(self, *args, **known)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def counting(self: Any) -> None:
        before = self.drafting.told.draft_calls
        with waits_counted() as counts:
            play(self)
        counts["draft steps"] = self.drafting.told.draft_calls - before
        counted.append(counts)

    monkeypatch.setattr(ModelOverCache, "__init__", opening)
    target, drafter = PAIRS[kind]()
    options = {"max_new_tokens": NEW, "do_sample": do_sample, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
    with drafting_goes_on():
        for calls in range(2):
            if calls:
                monkeypatch.setattr(Generation, "play_round", counting)
            torch.manual_seed(0)
            # A drafter that remembers texts knows the first one.
            prompts = {n: ids.to(DEVICE) for n, ids in models.prompts(BATCHES[batch], VOCAB, seed=calls).items()}
            target.generate(**prompts, **options, assistant_model=drafter)
    assert drafter.last_stats.drafted_tokens, "nothing to count"
    return counted


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", DRAFTERS if DEVICE.type != "cuda" else PAIRS)
def test_waits_of_a_round(kind: str, batch: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        counted = on_a_gpu(kind, batch, do_sample, monkeypatch)
    else:
        counted = rounds(models.llama(VOCAB), kind, batch, do_sample, monkeypatch)
        for counts in counted:
            counts["ours"] = counts["to_host"] + counts["waiting"]
    assert len(counted) > 4
    known = kind in HELD_TO
    most = [allowed(kind, batch, do_sample, counts["draft steps"])[1] if known else sys.maxsize for counts in counted]
    over = sum(counts["ours"] > limit for counts, limit in zip(counted, most, strict=True))
    places: Counter[str] = Counter()
    for counts in counted:
        places.update({place: n for place, n in counts.items() if ":" in place})
    note(
        "waits",
        drafter=kind,
        rows=int(batch),
        sampled=do_sample,
        rounds=len(counted),
        waits=mean(counts["ours"] for counts in counted),
        allowed=mean(most) if known else None,
        over=over,
        of_transformers=mean(counts["transformers'"] for counts in counted),
        places=dict(places.most_common(6)),
    )
    assert not over, f"{over} of {len(counted)} rounds wait more often than on the CPU: {places.most_common(6)}"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU waits for nothing")
def test_the_counting_counts() -> None:
    x = torch.arange(4, device=DEVICE)
    with waits_counted() as counts:
        x.tolist(), x[1].item(), bool(x[0]), x[x > 1], torch.tensor([1]).to(DEVICE)
    assert counts["ours"] == 5, counts
