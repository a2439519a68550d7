"""Models whose cache wants rows of one length: rows get ahead of each other all the same, and say what plain ones
do."""

from typing import Any
from unittest import mock

import drafters
import models
import pytest
import torch
from torch import Tensor

from hf_specdec import PearlDrafter, PromptLookupDrafter
from hf_specdec.probe import Support
from hf_specdec.protocol import Draft
from hf_specdec.target.staggered import EXTRA, FARTHEST, farthest

NAMES = ["Bloom", "GPT-Neo"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}


def generate(model: Any, rows: int, drafter: Any = None, **options: Any) -> Tensor:
    return model.generate(**models.prompts([9, 5, 7, 3][:rows]), assistant_model=drafter, **OPTIONS | options)


def partly(future: Any, wrong: set[int], gamma: int = 4) -> drafters.Toy:
    """Right in all rows but some, in which it is never right."""
    right, never = drafters.oracle(future, gamma), drafters.adversary(future, gamma, models.VOCAB)

    def propose(context: Any, sequences: Any, budget: list[int]) -> Any:
        both = [toy.function(context, sequences, budget) for toy in (right, never)]
        texts = [
            both[row in wrong].tokens[b, : both[row in wrong].lengths[b]].tolist()
            for b, row in enumerate(sequences.rows)
        ]
        return Draft.from_lists(texts)

    return drafters.Toy(propose)


@pytest.mark.parametrize("wrong", [set(), {0}, {1, 2}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_plain_decodings(name: str, rows: int, wrong: set[int]) -> None:
    model = models.build(name, "eager")
    plain = generate(model, rows)
    ends = {"eos_token_id": [1, int(plain[0, 15])]}
    for options in ({}, ends, {"max_new_tokens": 3}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3}):
        wanted = generate(model, rows, **options)
        drafter = partly(drafters.Future(wanted), wrong)
        assert torch.equal(generate(model, rows, drafter, **options), wanted)
        assert drafter.last_stats.mode == ("lockstep" if "repetition_penalty" in options else "staggered")


def test_a_row_that_is_unlucky_in_one_round_holds_nobody_up() -> None:
    """Rows that are right equally often, at other times: together they would advance by the least of each round."""
    model = models.build("Bloom", "eager")
    wanted = generate(model, 4, max_new_tokens=80, eos_token_id=None)
    calls = {}
    for cache in (False, True):  # a cache that is kept has rows of one length
        drafter = drafters.noisy(drafters.Future(wanted), 4, models.VOCAB, 0.3)
        kept = {"return_dict_in_generate": True} if cache else {}
        text = generate(model, 4, drafter, max_new_tokens=80, eos_token_id=None, **kept)
        assert torch.equal(text.sequences if cache else text, wanted)
        calls[drafter.last_stats.mode] = drafter.last_stats.target_calls
    assert calls["staggered"] < 0.8 * calls["lockstep"]


def test_nobody_gets_further_ahead_than_it_costs() -> None:
    for slope, most in ((0.0, FARTHEST), (EXTRA / 4, 4), (1.0, 0)):
        assert farthest(lambda width, slope=slope: 1 + slope * (width - 1)) == most
    assert farthest(None) == FARTHEST
    model, seen = models.build("Bloom", "eager"), []
    wanted = generate(model, 3, max_new_tokens=60, eos_token_id=None)
    right = partly(drafters.Future(wanted), {1}, 6)

    def propose(context: Any, sequences: Any, budget: list[int]) -> Any:
        seen.append(max(sequences.lengths) - min(sequences.lengths))
        return right.function(context, sequences, budget)

    assert torch.equal(generate(model, 3, drafters.Toy(propose), max_new_tokens=60, eos_token_id=None), wanted)
    assert 0 < max(seen) <= FARTHEST


@pytest.mark.parametrize("kind", ["lookup", "pearl"])
def test_real_drafters_say_the_same(kind: str) -> None:
    model = models.build("Bloom", "eager")
    draft = models.llama()
    drafter: Any = PromptLookupDrafter() if kind == "lookup" else PearlDrafter(draft)
    for rows in (2, 3):
        assert torch.equal(generate(model, rows, drafter), generate(model, rows))
        assert drafter.last_stats.mode == "staggered"


def test_texts_go_to_the_last_position() -> None:
    """Rows end where the model's learned positions do; what pads short rows beside longer ones lies beyond."""
    model = models.build_gpt2(40)
    options = {"max_new_tokens": 31, "eos_token_id": None}
    wanted = generate(model, 3, **options)
    assert wanted.shape[1] == 40
    with mock.patch("hf_specdec.decoding.call.support", return_value=Support.LOCKSTEP):
        for wrong in (set(), {0}, {2}):
            drafter = partly(drafters.Future(wanted), wrong, 6)
            assert torch.equal(generate(model, 3, drafter, **options), wanted)
            assert drafter.last_stats.mode == "staggered"
