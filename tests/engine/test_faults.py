"""A drafter can only cost time: whatever it does, at whatever round, the text is plain decoding's, with one warning."""

import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import PROMPTS, Sides
from draft_faults import FAULTS, run_with_one_warning
from torch import Tensor
from toy_drafters import Draft

from hf_specdec import DraftModelDrafter, SpeculationWarning
from hf_specdec.session import DraftSession

BATCHES = pytest.mark.parametrize("lengths", [[7], PROMPTS])
ROUNDS = pytest.mark.parametrize("at_round", [0, 1, 3])


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


HARMLESS = {"ids as int32", "lengths of a tensor", "longer than asked for", "columns beyond the lengths"}
"""may be put up with, with no warning"""


def patience_of(fault: str) -> float:
    return 0.02 if fault in ("stalls", "no draft") else 60.0


@pytest.mark.grid(pairs=True)
@BATCHES
@pytest.mark.parametrize(
    "settings", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}], ids=lambda s: "".join(s)
)
@pytest.mark.parametrize("fault", FAULTS)
def test_greedy_text_survives(model: Any, fault: str, settings: dict, lengths: list[int]) -> None:
    sides = Sides(model, lengths, gamma=3, **settings)
    for at_round in (0, 1, 3):
        bad = drafters.faulty(sides.drafter, at_round, FAULTS[fault], patience_of(fault))
        assert torch.equal(run_with_one_warning(sides, bad, at_most=fault in HARMLESS), sides.plain)
        assert bad.sessions[0].closed == 1


@pytest.mark.grid(pairs=True)
@BATCHES
@pytest.mark.parametrize("fault", FAULTS)
def test_sampling_and_stepwise_judgement_survive(model: Any, fault: str, lengths: list[int]) -> None:
    """With a top-k of 1 sampling is greedy, so the text is known; a streamer keeps the rows in lockstep."""
    for more in ({}, {"prefix_allowed_tokens_fn": lambda row, ids: list(range(models.VOCAB))}):
        sides = Sides(model, lengths, gamma=3, **more)
        bad = drafters.faulty(sides.drafter, 1, FAULTS[fault], patience_of(fault))
        text = run_with_one_warning(sides, bad, at_most=fault in HARMLESS, do_sample=True, top_k=1, temperature=0.5)
        assert torch.equal(text, sides.plain)


# ------------------------------------------------------------------ the rest of a session's methods


def rebel(sides: Sides, method: str, answer: Callable[..., Any]) -> drafters.Toy:
    toy = drafters.Toy(sides.drafter.function)
    toy.session_class = type("Rebel", (drafters.ToySession,), {method: answer})
    return toy


def planted(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


@BATCHES
@pytest.mark.parametrize("method", ["__init__", "start_draft", "poll", "take", "observe", "close"])
def test_any_method_may_raise(model: Any, method: str, lengths: list[int]) -> None:
    sides = Sides(model, lengths, gamma=3)
    assert torch.equal(run_with_one_warning(sides, rebel(sides, method, planted)), sides.plain)


@BATCHES
def test_a_draft_that_never_comes(model: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths, gamma=3)
    toy = drafters.Toy(sides.drafter.function)
    toy.session_class = type("Never", (drafters.ToySession,), {"patience": 0.02, "poll": lambda self: False})
    assert torch.equal(run_with_one_warning(sides, toy), sides.plain)


class Mumbling(drafters.DrawingSession):
    """Draws soundly, but cannot say what q was."""

    answer: Any = None

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Any:
        return self.answer() if callable(self.answer) else self.answer


@BATCHES
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(
    "answer",
    [planted, None, torch.ones(3) / 3, torch.full((models.VOCAB,), float("nan")), torch.ones(models.VOCAB, 2)],
    ids=["raises", "none", "short", "NaN", "two columns"],
)
def test_a_bad_rest_of_q(
    model: Any, monkeypatch: pytest.MonkeyPatch, answer: Any, branches: int, lengths: list[int]
) -> None:
    answers = {"answer": staticmethod(answer) if callable(answer) else answer}
    monkeypatch.setattr(drafters, "DrawingSession", type("Mumbler", (Mumbling,), answers))
    sides = Sides(model, lengths)
    logits = torch.randn(models.VOCAB, models.VOCAB, generator=torch.Generator().manual_seed(0))
    toy = drafters.with_logits(lambda last: logits[last], 3, branches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeculationWarning)
        text = sides.run(assistant_model=toy, do_sample=True, top_k=20)
    assert text.shape == sides.plain.shape
    assert ((text >= 0) & (text < models.VOCAB)).all()


class Meddler(DraftSession):
    """Writes to what it is only allowed to read: past the lengths, which it may."""

    def propose(self, sequences: Any, room: list[int]) -> Draft:
        for b, length in enumerate(sequences.lengths):
            sequences.ids[b, length:] = 10**9
        return Draft.from_lists([[1]] * len(room))


@BATCHES
def test_columns_past_the_lengths_may_hold_anything(model: Any, lengths: list[int]) -> None:
    toy = drafters.Toy(lambda *_: None)
    toy.start = lambda context: Meddler(context)  # type: ignore[method-assign]
    sides = Sides(model, lengths, repetition_penalty=1.3)
    assert torch.equal(sides.ours(toy), sides.plain)


def test_the_targets_own_errors_are_not_swallowed(model: Any) -> None:
    sides = Sides(model)

    def criterion(ids: Tensor, scores: Any) -> Any:
        if ids.shape[1] < max(PROMPTS) + 9:
            return torch.zeros(len(ids), dtype=torch.bool)
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        sides.run(assistant_model=sides.drafter, stopping_criteria=[criterion])
    assert sides.drafter.sessions[-1].closed == 1


@pytest.mark.grid(pairs=True)
@ROUNDS
@BATCHES
@pytest.mark.parametrize("how", ["raises", "NaN", "infinite"])
def test_a_draft_model_that_breaks(model: Any, how: str, lengths: list[int], at_round: int) -> None:
    draft = models.llama(num_hidden_layers=1)
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    sides = Sides(model, lengths)
    forward, calls = draft.forward, [-1000]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        outputs = forward(*args, **kwargs)
        if calls[0] > 1 + 4 * at_round:
            if how == "raises":
                raise RuntimeError("planted")
            outputs.logits = outputs.logits * float("nan") if how == "NaN" else outputs.logits * float("inf")
        return outputs

    draft.forward = broken
    models.probed(draft)  # so that what comes is in a call's own rounds, not in the probe's
    for more in ({}, {"do_sample": True, "top_k": 1}):
        calls[0] = 0
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert torch.equal(sides.run(assistant_model=drafter, **more), sides.plain)
