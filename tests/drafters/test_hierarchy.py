"""Draft models that read ahead: what they draft is what they would have drafted, with fewer forwards of theirs."""

import copy
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from test_disco import classifier

import hf_specdec
from hf_specdec import (
    BatchDecoder,
    DiscoDrafter,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    SpeculationError,
    read_ahead,
    read_stepwise,
)
from hf_specdec.budget import Cost, DraftCost
from hf_specdec.drafters.draft_model.ahead import HOW, Ahead, copied, reading_ahead

NEW = 40
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda draft: DraftModelDrafter(draft, num_draft_tokens=5),
    "auto": DraftModelDrafter,
    "candidates": lambda draft: DraftModelDrafter(draft, num_candidates=3),
    "disco": lambda draft: DiscoDrafter(draft, classifier(), rule="token", tau=0.3, max_draft_tokens=6),
    "hybrid": lambda draft: HybridDrafter(draft, num_draft_tokens=4),
    "pearl": lambda draft: PearlDrafter(draft, window=4, worker="thread"),
}


class Known(Cost):
    """Forwards take so much longer per token."""

    known = True

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def tried(self, rows: int) -> int | None:
        return None

    def round(self, rows: int) -> Callable[[int], float]:
        return lambda width: 1 + self.slope * width


class Step(DraftCost):
    """Every step takes so long."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def observe(self, seconds: float) -> None:
        pass


def priced(draft: Any, slope: float, step: float) -> None:
    how = reading_ahead(draft)
    assert how is not None
    how.cost, how.smaller_cost = Known(slope), Step(step)


def draft_model(smaller: str) -> Any:
    """A draft that agrees with the target half of the time, read ahead by copies, by an oracle or by an adversary."""
    draft = models.llama(seed=3)
    target = models.llama()
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs + 0.03 * mine)
    below = {"copies": None, "oracle": copy.deepcopy(draft), "adversary": models.llama(seed=9)}[smaller]
    read_ahead(draft, below)
    priced(draft, slope=0.0, step=0.0)  # so that it reads as far ahead as there are guesses
    return draft


def generate(drafter: Any, lengths: list[int], **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    inputs = models.prompts(lengths) | {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return models.llama().generate(**inputs, **({} if drafter is None else {"assistant_model": drafter}))


@pytest.mark.grid
@pytest.mark.parametrize("smaller", ["copies", "oracle", "adversary"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("lengths", [[9], [7, 7, 7], [3, 11, 6]], ids=str)
def test_greedy_text_is_the_targets(kind: str, smaller: str, lengths: list[int]) -> None:
    drafter = DRAFTERS[kind](draft_model(smaller))
    for _ in range(2):  # what was measured in a call serves the next
        assert torch.equal(generate(drafter, lengths), generate(None, lengths))
        assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0


@pytest.mark.grid
@pytest.mark.parametrize("smaller", ["copies", "oracle", "adversary"])
@pytest.mark.parametrize("kind", ["fixed", "disco", "pearl"])
@pytest.mark.parametrize("lengths", [[9], [3, 11, 6]], ids=str)
def test_draws_are_those_of_a_draft_that_reads_step_by_step(kind: str, smaller: str, lengths: list[int]) -> None:
    """The same numbers draw the same tokens: so every distribution is what it was, whatever was guessed."""
    draft = draft_model(smaller)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    ahead = generate(DRAFTERS[kind](draft), lengths, **options)
    read_stepwise(draft)
    assert torch.equal(ahead, generate(DRAFTERS[kind](draft), lengths, **options))


@pytest.mark.parametrize("lengths", [[9], [7, 7, 7]], ids=str)
def test_an_oracle_saves_most_forwards_of_the_draft(lengths: list[int]) -> None:
    draft = draft_model("oracle")
    drafter = DraftModelDrafter(draft, num_draft_tokens=8)
    generate(drafter, lengths)
    assert drafter.last_stats is not None
    ahead = drafter.last_stats.draft_calls
    assert any("were read ahead" in note for note in drafter.last_stats.notes)
    read_stepwise(draft)
    generate(drafter, lengths)
    assert ahead < 0.5 * drafter.last_stats.draft_calls
    assert not any("were read ahead" in note for note in drafter.last_stats.notes)


def test_floors_below_floors() -> None:
    """A smaller model may read ahead itself."""
    draft = draft_model("oracle")
    below = reading_ahead(draft).smaller  # type: ignore[union-attr]
    read_ahead(below)
    drafter = DraftModelDrafter(draft, num_draft_tokens=5)
    assert torch.equal(generate(drafter, [3, 11, 6]), generate(None, [3, 11, 6]))


@pytest.mark.slow
def test_in_a_worker_of_its_own() -> None:
    """It is told when that changes: by then it has its model."""
    draft, calls = draft_model("oracle"), []
    how = reading_ahead(draft)
    with PearlDrafter(draft, window=4, worker="process") as drafter:
        for ahead in (True, False, True):
            read_stepwise(draft)
            if ahead:
                vars(draft)[HOW] = how
            assert torch.equal(generate(drafter, [9]), generate(None, [9]))
            assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0
            calls.append(drafter.last_stats.draft_calls)
    assert max(calls[0], calls[2]) < 0.8 * calls[1]


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["fixed", "pearl"])
@pytest.mark.parametrize("lengths", [[9], [7, 7, 7], [3, 11, 6]], ids=str)
def test_a_sliding_window_that_the_text_goes_past(kind: str, lengths: list[int]) -> None:
    """Rolled back to guesses, and then to what was accepted before them."""
    draft = models.build("Mistral", seed=3)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), models.llama().parameters(), strict=True):
            mine.copy_(theirs)
    read_ahead(draft, models.build("Mistral", seed=9))
    priced(draft, slope=0.0, step=0.0)
    drafter = DRAFTERS[kind](draft)
    for options in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 0}):
        ours = generate(drafter, lengths, **options)
        assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0
        assert not any("dropped" in note or "raised" in note for note in drafter.last_stats.notes)
        if not options:
            assert torch.equal(ours, generate(None, lengths))


def test_a_smaller_model_whose_context_is_full_leaves_copies() -> None:
    draft = draft_model("copies")
    read_ahead(draft, models.llama(seed=3, max_position_embeddings=8))
    priced(draft, slope=0.0, step=0.0)
    drafter = DRAFTERS["fixed"](draft)
    assert torch.equal(generate(drafter, [30]), generate(None, [30]))
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0


@pytest.mark.parametrize("smaller", ["copies", "oracle", "adversary"])
def test_rows_that_come_and_go(smaller: str) -> None:
    target = models.llama()
    drafter = DraftModelDrafter(draft_model(smaller), num_draft_tokens=4)
    prompts = [models.prompts([n], seed=n)["input_ids"][0].tolist() for n in (4, 9, 6, 12, 5)]
    with BatchDecoder(target, drafter, max_rows=2, max_tokens=256) as decoder:
        answers = [decoder.submit(prompt, max_new_tokens=20, do_sample=False) for prompt in prompts]
        found = [answer.result(60) for answer in answers]
    for prompt, tokens in zip(prompts, found, strict=True):
        plain = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert list(tokens) == plain


def test_where_guesses_are_wrong_they_cease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by what forwards take: an adversary is asked once in a while."""
    guessed: list[int] = []
    drafted = Ahead._drafted

    def counting(self: Ahead, *arguments: Any) -> Any:
        found = drafted(self, *arguments)
        guessed.append(len(found[0].tokens))
        return found

    monkeypatch.setattr(Ahead, "_drafted", counting)
    draft = draft_model("adversary")
    priced(draft, slope=0.2, step=0.3)
    how = reading_ahead(draft)
    assert how is not None
    before = how.survival.chance(("smaller", 0), 0.6)
    drafter = DraftModelDrafter(draft, num_draft_tokens=5)
    generate(drafter, [9])
    assert how.survival.chance(("smaller", 0), 0.6) < before
    assert len(guessed) > 40 and sum(map(bool, guessed)) < 0.2 * len(guessed)


def test_a_context_that_ends() -> None:
    draft = models.llama(seed=3, max_position_embeddings=32)
    read_ahead(draft, models.llama(seed=3, max_position_embeddings=24))
    priced(draft, slope=0.0, step=0.0)
    drafter = DraftModelDrafter(draft, num_draft_tokens=5)
    assert torch.equal(generate(drafter, [9]), generate(None, [9]))


@pytest.mark.parametrize(
    ("text", "match", "tokens"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4], 4, [5, 9, 1, 2, 3, 4]),
        ([7, 1, 2, 8, 1, 2, 5, 6, 1, 2], 2, [5, 6, 1, 2]),
        ([1, 2, 3], 0, []),
        ([3, 3, 3, 3, 3], 4, [3]),
        ([1], 0, []),
    ],
)
def test_copies(text: list[int], match: int, tokens: list[int]) -> None:
    assert copied(np.array(text)) == (match, tokens)


def test_bad_wishes() -> None:
    draft, other = models.llama(), models.llama(vocab=5_000)
    with pytest.raises(SpeculationError, match="smaller has a vocabulary of 5000 tokens and the draft model one of 97"):
        read_ahead(draft, other)
    with pytest.raises(SpeculationError, match="smaller must be another model than draft_model"):
        read_ahead(draft, draft)
    with pytest.raises(SpeculationError, match="smaller is a MambaForCausalLM, which keeps a state"):
        read_ahead(draft, models.build("Mamba", attention="eager"))
    below = models.llama(seed=1)
    read_ahead(below, draft)
    with pytest.raises(SpeculationError, match="smaller must be another model than draft_model"):
        read_ahead(draft, below)
    with pytest.raises(SpeculationError, match=r"draft_model must be .*DraftModelDrafter.*; pass its draft_model"):
        read_ahead(DraftModelDrafter(draft))  # type: ignore[arg-type]
    with pytest.raises(SpeculationError, match="smaller must be a transformers model, got 'folder'"):
        read_ahead(draft, "folder")  # type: ignore[arg-type]
    assert "read_ahead" in dir(hf_specdec)
