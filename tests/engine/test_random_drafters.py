"""A drafter can only cost time: whatever thousands of random ones do, the text is plain decoding's."""

import random
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import random_drafters
import torch
import toy_drafters as drafters
from torch import Tensor
from toy_drafters import Draft

from hf_specdec import SpeculationWarning
from hf_specdec.engine import engine

VOCAB, NEW, BLOCK = 31, 9, 250
"""of the model; tokens per call; calls per test"""
PATIENCE = 1.0
"""the longest of a random session"""
BATCHES: list[list[int]] = [[5], [5, 2, 3]]
SLACK = 60.0
"""seconds that a call may take beyond its drafter's patience, on a busy machine, too; one that hangs takes for ever"""


@cache
def model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return models.llama(VOCAB, num_hidden_layers=1, **sizes)


def halting(ids: Tensor, scores: Any) -> Tensor:
    """A criterion of the user's own: rows end at a token divisible by 11."""
    return ids[:, -1] % 11 == 0


SETTINGS: list[Callable[[], dict[str, Any]]] = [
    dict,
    dict,
    lambda: {"eos_token_id": [3, 8, 12, 17, 22]},
    lambda: {"eos_token_id": [3, 8, 12, 17, 22], "repetition_penalty": 1.3},
    lambda: {"no_repeat_ngram_size": 2, "suppress_tokens": [4, 9]},
    lambda: {"bad_words_ids": [[7], [5, 6]], "min_new_tokens": 4, "eos_token_id": [3, 8, 12]},
    lambda: {"stopping_criteria": [halting], "eos_token_id": [3, 8]},
    lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(0, VOCAB, 2))},
    lambda: {"output_hidden_states": True, "output_scores": True, "return_dict_in_generate": True},
]


class Streamer:
    def __init__(self) -> None:
        self.got: list[Tensor] = []

    def put(self, tokens: Tensor) -> None:
        self.got.append(tokens.clone().flatten())

    def end(self) -> None: ...


@cache
def plain(batch: int, setting: int, seed: int) -> Any:
    return call(batch, setting, seed)


def call(batch: int, setting: int, seed: int, **more: Any) -> Any:
    prompts = models.prompts(BATCHES[batch], VOCAB, seed)
    return model().generate(**prompts, **{"max_new_tokens": NEW, "do_sample": False} | SETTINGS[setting]() | more)


def ids_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


@cache
def scores() -> Tensor:
    return 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


def play(seed: int) -> None:
    """One call with a random drafter, greedy three times out of four."""
    dice = random.Random(seed)
    batch, setting, prompt = dice.randrange(2), dice.randrange(len(SETTINGS)), dice.randrange(4)
    expected = plain(batch, setting, prompt)
    sampled = dice.random() < 0.25
    drafter = random_drafters.make(dice, drafters.Future(ids_of(expected)), scores())
    streamer = Streamer() if batch == 0 and dice.random() < 0.2 else None
    more: dict[str, Any] = {"do_sample": True, "temperature": 1.5} if sampled else {}
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = call(batch, setting, prompt, assistant_model=drafter, streamer=streamer, **more)
    assert time.perf_counter() - began < PATIENCE + SLACK, "late"
    ours = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    assert sum("was dropped" in message for message in ours) <= 1, ours
    ids, known = ids_of(output), ids_of(expected)
    if sampled:
        assert ids.dtype == known.dtype and len(ids) == len(known) and ids.shape[1] <= max(BATCHES[batch]) + NEW
        assert bool(((ids >= 0) & (ids < VOCAB)).all())
    else:
        assert torch.equal(ids, known), f"{ids.tolist()} for {known.tolist()}"
        if not isinstance(output, Tensor):
            for got, wanted in zip(output.hidden_states, expected.hidden_states, strict=True):
                for mine, theirs in zip(got, wanted, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    if streamer is not None:
        assert torch.equal(torch.cat(streamer.got), ids[0])


@pytest.mark.grid
@pytest.mark.parametrize("block", [pytest.param(n, marks=[pytest.mark.slow] if n >= 4 else []) for n in range(20)])
def test_random_drafters_can_only_cost_time(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.eager  # others are no wider than what is recorded
@pytest.mark.parametrize("batch", [0, 1])
def test_a_draft_of_too_many_nodes_is_cut(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 nodes, the right ones first; said once. A small bound, too: what is cut is still a tree, and of use."""
    expected = plain(batch, 0, 0)
    future, rows = drafters.Future(expected), len(BATCHES[batch])

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        known = future(sequences, room, NEW)
        tokens = [row + [1] * (10_000 - len(row)) for row in known]
        return Draft(
            torch.tensor(tokens),
            [10_000] * len(known),
            [[i - 1 if i < len(row) else -1 for i in range(10_000)] for row in known],
        )

    for most in (engine.MOST_FED, 2 * rows):
        monkeypatch.setattr(engine, "MOST_FED", most)
        monkeypatch.setattr(engine, "LEAST_FED", 1)
        toy = drafters.Toy(propose, trees=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(call(batch, 0, 0, assistant_model=toy), expected)
        said = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
        assert len(said) == 1 and f"is fed {most // rows} of them" in said[0], said
        stats = toy.last_stats
        assert stats is not None and max(stats.verify_widths) == most // rows + 1
        assert stats.accepted_tokens > 0 and stats.mode == "ragged"


@pytest.mark.eager
def test_the_budget_keeps_a_chain_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_FED", 6)
    monkeypatch.setattr(engine, "LEAST_FED", 1)
    expected = plain(1, 0, 0)
    toy = drafters.oracle(drafters.Future(expected), NEW)
    assert torch.equal(call(1, 0, 0, assistant_model=toy), expected)
    assert toy.last_stats is not None and max(toy.last_stats.verify_widths) == 3
