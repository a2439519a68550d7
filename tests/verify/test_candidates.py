"""Several tokens tried at each position of a draft model's draft: the same text, more of it per call."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides, uneven_eos

from hf_specdec import DraftModelDrafter, HybridDrafter, theory
from hf_specdec.drafters.chains import with_candidates
from hf_specdec.tools.instruments.forwards import wrapped_forward

KINDS = [DraftModelDrafter, HybridDrafter]


@contextmanager
def second_thoughts(draft: Any, rank: int = 1) -> Iterator[None]:
    """Its likeliest token changes places with the one of this rank."""

    def around(forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        top = output.logits.topk(rank + 1).indices[..., [0, rank]]
        output.logits = output.logits.scatter(-1, top, output.logits.gather(-1, top.flip(-1)))
        return output

    with wrapped_forward(draft, around):
        yield


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [2, 3, 16])
@pytest.mark.parametrize("gamma", [1, 4, "auto"])
@pytest.mark.parametrize("lengths", [[7], PROMPTS])
@pytest.mark.parametrize("ends", [False, True])
def test_the_text_is_plains(kind: Any, candidates: int, gamma: Any, lengths: list[int], ends: bool) -> None:
    model, draft = models.llama(), models.llama(seed=3)
    settings = {"eos_token_id": uneven_eos(model, PROMPTS)} if ends else {}
    sides = Sides(model, lengths, **settings)
    drafter = kind(draft, num_draft_tokens=gamma, num_candidates=candidates)
    assert torch.equal(sides.ours(drafter), sides.plain)
    with second_thoughts(copied := models.llama()):  # mostly right, in its second choice
        assert torch.equal(sides.ours(kind(copied, num_draft_tokens=gamma, num_candidates=candidates)), sides.plain)


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
@pytest.mark.parametrize("rank", [1, 2])
def test_what_another_candidate_is_right_about_is_accepted(lengths: list[int], rank: int) -> None:
    sides = Sides(models.llama(), lengths)
    rounds = {}
    for candidates in (1, rank, rank + 1):
        drafter = DraftModelDrafter(draft := models.llama(), num_draft_tokens=3, num_candidates=candidates)
        with second_thoughts(draft, rank):
            assert torch.equal(sides.ours(drafter), sides.plain)
        run = drafter.last_stats
        assert run is not None
        rounds[candidates] = run.row_steps
        assert set(run.accepted_per_position) == ({0} if candidates > rank else set())
    assert rounds[1] == rounds[rank] > 1.8 * rounds[rank + 1]


def test_what_is_drawn_at_random_stays_alone() -> None:
    sides = Sides(models.llama(), PROMPTS, do_sample=True)
    drafter = DraftModelDrafter(models.llama(seed=3), num_draft_tokens=3, num_candidates=4)
    torch.manual_seed(0)
    several = sides.ours(drafter)
    torch.manual_seed(0)
    assert torch.equal(several, sides.ours(DraftModelDrafter(models.llama(seed=3), num_draft_tokens=3)))


def test_where_no_trees_are_taken_the_first_candidate_is_drafted() -> None:
    model = models.llama()
    inputs = models.prompts([7]) | {"do_sample": False, "max_new_tokens": 12, "output_scores": True}
    inputs["return_dict_in_generate"] = True
    drafter = DraftModelDrafter(models.llama(), num_draft_tokens=3, num_candidates=4)
    ours, plain = model.generate(**inputs, assistant_model=drafter), model.generate(**inputs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert drafter.last_stats is not None and set(drafter.last_stats.verify_widths) <= {1, 2, 3, 4}


def test_the_tree() -> None:
    drafted, beside = torch.tensor([[1, 2, 3]]), torch.tensor([[[4, 5], [6, 7], [8, 9]]])
    draft = with_candidates(drafted, beside, [2])
    assert draft.tokens.tolist() == [[1, 4, 5, 2, 6, 7, 3, 8, 9]]
    assert draft.parents == [[-1, -1, -1, 0, 0, 0, 3, 3, 3]]
    assert draft.lengths == [6]


@pytest.mark.parametrize(("alpha", "rescue"), [(0.0, 0.3), (0.5, 0.0), (0.5, 0.4), (0.9, 0.5), (1.0, 0.7)])
def test_expected_tokens_with_candidates(alpha: float, rescue: float) -> None:
    """20,000 rounds: the mean is within 4 standard errors, of at most 0.02 each."""
    dice, rounds = random.Random(0), 20_000
    total = 0
    for _ in range(rounds):
        accepted = next((i for i in range(4) if dice.random() >= alpha), 4)
        total += accepted + 1 + (accepted < 4 and dice.random() < rescue)
    assert total / rounds == pytest.approx(theory.expected_tokens(alpha, 4, rescue), abs=0.08)
