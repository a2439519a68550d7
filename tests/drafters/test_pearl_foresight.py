"""Corrections that PEARL drafts for are the likeliest that the target may make."""

import itertools
import random

import pytest
import torch
from models import llama, prompts

from hf_specdec import PearlDrafter
from hf_specdec.drafters.pearl.token import DraftToken
from hf_specdec.drafters.pearl.worker import drafting
from hf_specdec.drafters.pearl.worker.foresight import likeliest


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_all_places_are_taken(seed: int) -> None:
    chance = random.Random(seed).random
    drafted = []
    for column in range(7, 12):
        drafted.append((column, DraftToken(2, range(5), [chance() for _ in range(5)])))
    every, reached = {}, 1.0
    for column, (_, likely, chances) in drafted:
        every |= {(column, token): reached * p for token, p in zip(likely, chances, strict=True) if token not in (2, 4)}
        reached *= chances[2]
    ranked = sorted(every, key=every.__getitem__, reverse=True)
    for most in (0, 1, 5, 15, 30):
        assert likeliest(drafted, most, banned=[4]) == ranked[:most]


def test_where_the_draft_is_sure_nothing_is_expected() -> None:
    sure, torn = DraftToken(0, [0, 1, 2], [0.99, 0.005, 0.004]), DraftToken(0, [3, 4, 0], [0.35, 0.2, 0.4])
    assert likeliest([(0, sure), (1, torn)], 2) == [(1, 3), (1, 4)]
    assert likeliest([(0, torn), (1, sure)], 2) == [(0, 3), (0, 4)]


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_worker_keeps_in_mind_what_the_draft_thought(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances of the drafted token and of the likeliest ones. Nothing is drafted behind one that ends the text."""
    met: list[DraftToken] = []

    def watched(drafted: list[tuple[int, DraftToken]], most: int, banned: frozenset[int]) -> list[tuple[int, int]]:
        met.extend(token for _, token in drafted)
        forks = likeliest(drafted, most, banned)
        assert len(forks) == most and 5 not in [token for _, token in forks]
        return forks

    monkeypatch.setattr(drafting, "likeliest", watched)
    target, draft = llama(vocab=24), llama(vocab=24, seed=3)
    drafter = PearlDrafter(draft, window=3, worker="thread", corrections=2)
    torch.manual_seed(0)
    options = {"max_new_tokens": 32, "do_sample": do_sample, "eos_token_id": 5, "pad_token_id": 0, "min_new_tokens": 32}
    target.generate(**prompts([9], 24), **options, assistant_model=drafter)
    assert len(met) > 10
    for drafted in met:
        assert drafted.can_be(24, sampled=True)
        assert do_sample or drafted.chance == max(drafted.chances)
    assert any(a != b for a, b in itertools.pairwise(met))
