"""Likely corrections that PEARL feeds to the target as branches, where its width is free."""

import itertools
from typing import Any

import pytest
import torch
from close_drafts import close_to
from models import VOCAB
from pearl_pairs import DRAFTS, TARGET, generate, pearl, second_best

from hf_specdec.budget import Overlap
from hf_specdec.drafters.pearl.overlap import Drafted, Plan, Side, Turn, turn
from hf_specdec.engine.own_schedule import from_fed
from hf_specdec.protocol import Draft


@pytest.fixture
def free_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of the target costs the same at any width."""
    monkeypatch.setattr(Overlap, "spare", lambda *_: 64)


def sometimes_second(model: Any) -> Any:
    """A draft that knows the model's token, and prefers another one to every fourth or so."""

    def disturb(module: Any, inputs: Any, outputs: Any) -> None:
        best = outputs.logits.argmax(-1, keepdim=True)
        other = torch.where(best % 4 == 0, 1.0, -1.0)
        outputs.logits = torch.full_like(outputs.logits, -30.0).scatter(-1, best, 0.0)
        outputs.logits = outputs.logits.scatter(-1, (best + 1) % VOCAB, other)

    draft = close_to(model, 0.0)
    draft.register_forward_hook(disturb)
    return draft


ORACLE, ADVERSARY = sometimes_second(TARGET), second_best(TARGET)
ALL = {**DRAFTS, "oracle": ORACLE, "adversary": ADVERSARY}


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("draft", ["middling", "oracle", "adversary"])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 4, "auto"])
@pytest.mark.parametrize("corrections", [1, 3])
def test_greedy_text_is_plain_decodings(
    corrections: int, window: Any, lengths: tuple[int, ...], draft: str, free_width: None
) -> None:
    drafter = pearl(ALL[draft], window=window, corrections=corrections)
    assert torch.equal(generate(drafter, lengths), generate(None, lengths))


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1)], ids=str)
@pytest.mark.parametrize("corrections", [1, 3])
def test_a_correction_that_was_fed_costs_no_forward(
    corrections: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for spare in (0, 64):
        monkeypatch.setattr(Overlap, "spare", lambda *_, spare=spare: spare)
        drafter = pearl(ORACLE, window=4, corrections=corrections)
        assert torch.equal(generate(drafter, lengths, max_new_tokens=60), generate(None, lengths, max_new_tokens=60))
        calls.append(drafter.last_stats.target_calls)
        assert bool(drafter.last_timeline.sides) == bool(spare)
    assert calls[1] < calls[0]


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1)], ids=str)
@pytest.mark.parametrize("at", range(1, 14))
def test_an_end_of_text_or_a_length_anywhere_in_a_round_ends_the_row(
    at: int, lengths: tuple[int, ...], free_width: None
) -> None:
    end = {"eos_token_id": int(generate(None, lengths)[-1, max(lengths) + at])}
    for options in (end, {"max_new_tokens": at}):
        drafter = pearl(ORACLE, window=4, corrections=1)
        assert torch.equal(generate(drafter, lengths, **options), generate(None, lengths, **options))


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1)], ids=str)
def test_processors_see_plain_decodings_prefixes(changes: dict, lengths: tuple[int, ...], free_width: None) -> None:
    options = changes | {"eos_token_id": 5, "max_new_tokens": 40}
    drafter = pearl(ORACLE, window=4, corrections=2)
    assert torch.equal(generate(drafter, lengths, **options), generate(None, lengths, **options))


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1)], ids=str)
@pytest.mark.parametrize("coupled", [False, True])
def test_a_drawn_text_does_not_depend_on_them(
    coupled: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where q decides what is accepted, none are fed; coupled draws are chosen by equality, as greedy ones are."""
    texts, options = [], {"speculation": {"sampling": "coupled"}} if coupled else {}
    fed = 0
    for spare, window in itertools.product((0, 64), (2, 4)):
        monkeypatch.setattr(Overlap, "spare", lambda *_, spare=spare: spare)
        torch.manual_seed(5)
        drafter = pearl(DRAFTS["good"], window=window, corrections=2)
        texts.append(generate(drafter, lengths, do_sample=True, max_new_tokens=60, **options))
        fed += drafter.last_timeline.sides
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert bool(fed) == coupled


def test_a_turns_tree() -> None:
    """Carried tokens, sides, then the first token behind each of them."""
    side = [Side(0, [Drafted(5), Drafted(6)], 3), Side(1, [Drafted(7)], 4)]
    now = Turn([Drafted(1), Drafted(2)], 3, side)
    assert now.fed == 5 == len(now.tree().tokens)
    tree = now.tree([[Drafted(n), Drafted(0)] for n in (11, 12, 13)])
    assert tree.tokens == [1, 2, 5, 6, 7, 11, 12, 13]
    assert tree.parents == [-1, 0, -1, 2, 0, 1, 3, 4]
    assert tree.lines == [0, 0, 1, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("spare", "room", "kept"), [(9, 9, [0, 1]), (2, 9, [0]), (1, 9, [1]), (0, 9, []), (9, 4, [0]), (9, 2, [])]
)
def test_sides_keep_to_the_spare_width_and_to_the_room(spare: int, room: int, kept: list[int]) -> None:
    plan = Plan(3, pre_verify=True, post_verify=True, corrections=1, spare=spare)
    sides = [Side(0, [Drafted(5), Drafted(6)], 3), Side(1, [Drafted(7)], 4)]
    assert turn(plan, [Drafted(1), Drafted(2)], room, sides).sides == [sides[i] for i in kept]


@pytest.mark.parametrize(("slope", "least", "most"), [(0.0, 12, 64), (0.002, 5, 20), (0.2, 0, 0)])
def test_width_is_spare_where_it_is_measured_to_be_free(slope: float, least: int, most: int) -> None:
    overlap = Overlap(4, 1, overlapped=True)
    assert overlap.plan(1).spare == 0
    for width in [2, 5, 8] * 4:
        overlap.observe_step(1.0)
        overlap.observe_forward(1, width, 4.0 * (1 + slope * width))
    assert least <= overlap.plan(1).spare <= most


def test_what_is_judged_begins_with_the_tree_that_was_fed() -> None:
    """Whatever the drafter says of it."""
    fed = Draft.from_trees([([1, 2, 5], [-1, 0, -1]), ([3], [-1])])
    told = Draft.from_trees([([9, 9, 9, 7, 8], [-1, -1, -1, 1, 2]), ([9, 4], [-1, 0])])
    judged = from_fed(told, fed, [3, 1])
    assert judged.tokens[0].tolist() == [1, 2, 5, 7, 8] and judged.tokens[1, :2].tolist() == [3, 4]
    assert judged.parents == [[-1, 0, -1, 1, 2], [-1, 0, -1, -1, -1]] and judged.lengths == [5, 2]
