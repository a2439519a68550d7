"""Drafters are copied and pickled like models (spawned workers, deep-copied settings): options and weights come along,
what was learned or is running stays behind."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hub_tools import ON_ANY_TARGET, PROMPT, drafter_of, tiny_model

from hf_specdec import Drafter, PearlDrafter, SuffixDrafter
from hf_specdec.budget import Learned

COPY: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda drafter: pickle.loads(pickle.dumps(drafter)),
}


def generate(drafter: Drafter, **options: Any) -> torch.Tensor:
    told = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return tiny_model().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), assistant_model=drafter, **told)


def learned(value: Any) -> list[int]:
    """How many targets each `Learned` of a drafter knows, those of its parts, too."""
    parts = [*vars(value).values()] if isinstance(value, Drafter) else value.values() if isinstance(value, dict) else []
    return [len(value._of)] if isinstance(value, Learned) else [n for part in parts for n in learned(part)]


@pytest.mark.set_times
@pytest.mark.parametrize("way", COPY)
@pytest.mark.parametrize("name", ON_ANY_TARGET)
def test_a_copy_drafts_as_its_original(name: str, way: str) -> None:
    original = drafter_of(name)
    text = generate(original)
    twin = COPY[way](original)
    assert type(twin) is type(original) and repr(twin) == repr(original)
    assert twin.config == original.config and twin.config is not original.config
    assert twin.last_stats is None and original.last_stats is not None
    assert not any(learned(twin)) and len(learned(twin)) == len(learned(original))
    mine, theirs = original.weights(), twin.weights()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert torch.equal(generate(twin), text)
    if name != "pearl":  # two threads, of which now one, now the other is ahead
        generate(fresh := drafter_of(name))
        assert twin.last_stats.drafted_tokens == fresh.last_stats.drafted_tokens  # the twin knew no more


def test_what_was_seen_in_past_outputs_stays_behind() -> None:
    drafter = SuffixDrafter(memory_mb=3)
    generate(drafter)
    twin = copy.deepcopy(drafter)
    assert len(drafter.store) > 0 and len(twin.store) == 0
    assert twin.store.capacity == drafter.store.capacity


def test_a_copy_has_a_worker_of_its_own() -> None:
    with PearlDrafter(tiny_model(1), worker="process", window=3) as drafter:
        with pickle.loads(pickle.dumps(drafter)) as twin:
            ((mine,), (theirs,)) = drafter.workers.free, twin.workers.free
            assert mine.process.pid != theirs.process.pid
        assert theirs.process.poll() is not None and mine.process.poll() is None


def test_a_spawned_process_takes_a_drafter() -> None:
    drafter = drafter_of("hybrid")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.apply(generate, (drafter,)), generate(drafter))
