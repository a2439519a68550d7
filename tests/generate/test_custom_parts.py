"""A user's processors and criteria see exactly the calls that plain decoding makes: the whole batch, each position
once, never a rejected token."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import NEW, PROMPTS, Sides, uneven_eos
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

BATCHES = [[7], PROMPTS]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


class Spy(LogitsProcessor):
    """Writes down its calls; `change` may make it matter."""

    def __init__(self, log: list, change: Any = None) -> None:
        self.log, self.change = log, change

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append((input_ids.clone(), scores.clone()))
        return scores if self.change is None else self.change(len(self.log), input_ids, scores)


class CriterionSpy(StoppingCriteria):
    """Writes down its calls."""

    def __init__(self, log: list, done: Any = None) -> None:
        self.log, self.done = log, done

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.append((input_ids.clone(), scores))
        nothing = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return nothing if self.done is None else self.done(len(self.log), input_ids)


def by_step(step: int, ids: Tensor, scores: Tensor) -> Tensor:
    """Stateful: depends on how often it was called."""
    return scores.roll(step, dims=-1)


def by_row(step: int, ids: Tensor, scores: Tensor) -> Tensor:
    """Looks at the row index."""
    return torch.stack([row.roll(i, dims=-1) for i, row in enumerate(scores)])


def by_text(step: int, ids: Tensor, scores: Tensor) -> Tensor:
    return scores.roll(int(ids[0, -1]) % 5, dims=-1)


def in_place(step: int, ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, : step % 50] = -torch.inf
    return scores


def same_calls(a: list, b: list) -> None:
    assert len(a) == len(b)
    for (ids_a, scores_a), (ids_b, scores_b) in zip(a, b, strict=True):
        assert torch.equal(ids_a, ids_b)
        if isinstance(scores_a, Tensor):
            assert scores_a.dtype == scores_b.dtype
            torch.testing.assert_close(scores_a, scores_b, atol=2e-3, rtol=1e-3)
        else:
            assert (scores_a is None) == (scores_b is None) and len(scores_a or ()) == len(scores_b or ())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("change", [None, by_step, by_row, by_text, in_place])
def test_processors_see_plains_calls(model: Any, change: Any, lengths: list[int], ends: bool) -> None:
    logs: list[list] = []

    def spy() -> LogitsProcessorList:
        logs.append([])
        return LogitsProcessorList([Spy(logs[-1], change)])

    eos = None
    if ends:
        free = Sides(model, lengths, logits_processor=spy).plain[:, -NEW:]
        eos = [int(free[row, step]) for row, step in enumerate((4, 9)[: len(lengths)])]
        logs.clear()
    sides = Sides(model, lengths, eos_token_id=eos, logits_processor=spy, repetition_penalty=1.1)
    assert torch.equal(sides.ours(), sides.plain)
    same_calls(*logs)
    assert sides.stats.accepted_tokens > 0
    tree = drafters.bushy(drafters.Future(sides.plain), 3, models.VOCAB)
    assert torch.equal(sides.ours(tree), sides.plain)
    same_calls(logs[0], logs[2])


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("lengths", BATCHES)
def test_criteria_see_plains_calls(model: Any, lengths: list[int], ends: bool, scores: bool) -> None:
    logs: list[list] = []

    def spy() -> StoppingCriteriaList:
        logs.append([])
        return StoppingCriteriaList([CriterionSpy(logs[-1])])

    eos = uneven_eos(model, lengths, (4, 9)[: len(lengths)]) if ends else None
    more = {"return_dict_in_generate": True, "output_scores": True} if scores else {}
    sides = Sides(model, lengths, eos_token_id=eos, stopping_criteria=spy, **more)
    ours = sides.ours()
    same_calls(*logs)
    if not scores:
        assert torch.equal(ours, sides.plain)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", BATCHES)
def test_custom_criteria_complete_mid_block(model: Any, lengths: list[int], step: int, ends: bool) -> None:
    """Rows stop one after the other, by a rule of the user's."""

    def done(call: int, ids: Tensor) -> Tensor:
        return torch.tensor([call == step + 2 * row for row in range(ids.shape[0])])

    def criteria() -> StoppingCriteriaList:
        return StoppingCriteriaList([CriterionSpy([], done)])

    eos = uneven_eos(model, lengths, (6,)) if ends else None
    sides = Sides(model, lengths, gamma=9, eos_token_id=eos, stopping_criteria=criteria, pad_token_id=0)
    assert torch.equal(sides.ours(), sides.plain)
    oracle = drafters.oracle(drafters.Future(sides.plain), 9)
    assert torch.equal(sides.ours(oracle), sides.plain)


@pytest.mark.parametrize("lengths", BATCHES)
def test_sampled_processors_see_each_position_once(model: Any, lengths: list[int]) -> None:
    log: list = []
    sides = Sides(model, lengths)
    text = sides.run(
        assistant_model=sides.drafter,
        do_sample=True,
        temperature=0.1,
        logits_processor=LogitsProcessorList([Spy(log, by_step)]),
    )
    assert [ids.shape for ids, _ in log] == [(len(lengths), max(lengths) + i) for i in range(NEW)]
    assert all(torch.equal(ids, text[:, : ids.shape[1]]) for ids, _ in log)
