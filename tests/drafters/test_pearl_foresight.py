"""Corrections that PEARL drafts for are the likeliest that the target may make."""

import itertools
import random

import pytest
import torch
from models import llama, prompts

from hf_specdec import PearlDrafter
from hf_specdec.drafters.pearl.worker import drafting
from hf_specdec.drafters.pearl.worker.foresight import REMEMBERED, Place, likeliest


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_all_places_are_taken(seed: int) -> None:
    chance = random.Random(seed).random
    places = [(column, Place(chance(), [(token, chance()) for token in range(4)])) for column in range(7, 12)]
    every = {}
    for n, (column, place) in enumerate(places):
        reached = 1.0
        for _, before in places[:n]:
            reached *= before.chance
        every |= {(column, token): reached * other for token, other in place.others}
    ranked = sorted(every, key=every.__getitem__, reverse=True)
    for most in (0, 1, 5, 20, 30):
        assert likeliest(places, most) == ranked[:most]


def test_where_the_draft_is_sure_nothing_is_expected() -> None:
    sure, torn = Place(0.99, [(1, 0.005), (2, 0.004)]), Place(0.4, [(3, 0.35), (4, 0.2)])
    assert likeliest([(0, sure), (1, torn)], 2) == [(1, 3), (1, 4)]
    assert likeliest([(0, torn), (1, sure)], 2) == [(0, 3), (0, 4)]


@pytest.mark.parametrize("do_sample", [False, True])
def test_places_hold_what_the_draft_thought(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances of the drafted token and of the likeliest others, none of which is the drafted one or ends the text."""
    met: list[Place] = []

    def watched(places: list[tuple[int, Place]], most: int) -> list[tuple[int, int]]:
        met.extend(place for _, place in places)
        forks = likeliest(places, most)
        assert len(forks) == min(most, sum(len(place.others) for _, place in places))
        return forks

    monkeypatch.setattr(drafting, "likeliest", watched)
    target, draft = llama(vocab=24), llama(vocab=24, seed=3)
    drafter = PearlDrafter(draft, window=3, worker="thread", corrections=2)
    torch.manual_seed(0)
    options = {"max_new_tokens": 32, "do_sample": do_sample, "eos_token_id": 5, "pad_token_id": 0, "min_new_tokens": 32}
    target.generate(**prompts([9], 24), **options, assistant_model=drafter)
    assert len(met) > 10
    for place in met:
        chances = [chance for _, chance in place.others]
        assert len(chances) <= REMEMBERED and chances == sorted(chances, reverse=True)
        assert place.chance > 0 and place.chance + sum(chances) <= 1 + 1e-5
        assert 5 not in [token for token, _ in place.others]
        assert do_sample or all(place.chance >= chance for chance in chances)
    assert any(a != b for a, b in itertools.pairwise(met))
