"""When a draft model is asked, and what that takes: looks are rare, and no disturbance spoils a figure for good."""

import itertools
import random
from collections.abc import Callable
from functools import partial

import models
import pytest

from hf_specdec import Drafter, DraftModelDrafter, HybridDrafter
from hf_specdec.budget import Advance, Cost, DraftCost, Rest
from hf_specdec.budget.allowance import AT_HAND, OWED, SHARE
from hf_specdec.budget.draft_cost import HOLDS, LOOK_STEPS
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.drafters.draft_model import BudgetedSession, GrowingSession


def known(c: float, slope: float = 0.0) -> tuple[Cost, DraftCost]:
    """Of a target whose rounds take a second and slope for each further token, and a draft model whose steps take c."""
    cost, draft = Cost(), DraftCost()
    for _ in range(3):
        for width in (1, 2, 3):
            cost.observe_forward(1, width, 1.0 + slope * (width - 1))
        draft.observe(c)
    draft.allowance.left = 0.0
    return cost, draft


def rounds(draft: DraftCost, cost: Cost, unread: float = 0.0) -> int:
    """To the next look."""
    return next(n for n in itertools.count(1) if draft.asked(False, cost, unread=unread) is not None)


def test_looks_are_rarer_where_they_take_long() -> None:
    cost, draft = Cost(), DraftCost()
    for _ in range(3):
        cost.observe_forward(1, 1, 1.0)
        draft.observe(0.1)
    draft.observe_reading(5.0, 10)  # a short one takes longer per token
    draft.observe_reading(4.0, 1000)
    draft.observe_reading(1.0, 0)
    assert draft.reading == pytest.approx(0.004)

    draft.allowance.left = 0.0
    assert rounds(draft, cost) == pytest.approx(0.2 / SHARE, abs=1)
    draft.observe_look(2.0)  # what was accepted since the last one had to be read, too
    assert rounds(draft.begin(), cost) == pytest.approx(2.0 / SHARE, abs=1)
    rounds(draft.begin(), cost, 1.0)  # is paid when there is as much at hand as there can be
    assert rounds(draft.begin(), cost) == pytest.approx((2.0 + 3.0 - AT_HAND) / SHARE, abs=2)


def test_a_look_costs_what_all_its_candidates_take_to_verify() -> None:
    prices = []
    for candidates in (1, 4):
        cost, draft = known(0.1, slope=0.05)
        draft.allowance.left = AT_HAND
        prices.append(draft.asked(False, cost, candidates=candidates))
    assert prices == pytest.approx([LOOK_STEPS * (0.1 + 0.05), LOOK_STEPS * (0.1 + 4 * 0.05)], abs=0.01)


def test_what_opens_a_draft_is_no_step_of_it() -> None:
    """A first step reads what was accepted meanwhile: a longer window does not pay for that again."""
    draft = DraftCost()
    for steps in (3, 3, 1, 4, 1):
        draft.observe_draft(steps, 1.5, 1.5 + steps - 1)
    assert (draft.step, draft.opening) == pytest.approx((1.0, 0.5))
    draft.observe_draft(2, 40.0, 41.0, usual=False)  # and read much behind a pause
    assert (draft.step, draft.opening) == pytest.approx((1.0, 0.5))
    draft.observe_draft(1, 0.5, 0.5)  # a step that was measured as too long comes down where one is drafted alone, too
    assert draft.step == pytest.approx(0.5)


def test_what_opens_a_draft_is_found_out_anew_where_it_was_disturbed() -> None:
    """Else it would never pay again: what is asked again behind a pause reads more than usual, and did not count."""
    draft = DraftCost()
    for _ in range(4):
        draft.observe_draft(3, 1.5, 3.5)
    draft.observe_draft(3, 600.0, 602.0)
    assert draft.opening < 0.6  # a single one hardly counts, however long it took
    for _ in range(40):
        draft.observe_draft(3, 600.0, 602.0)
    assert draft.opening > 1.0
    draft.observe_draft(2, 1.6, 2.6, usual=False)
    assert draft.opening == pytest.approx(0.6)
    draft.observe_draft(3, 1.0, 3.0)  # nothing had to be read
    draft.observe_draft(3, 600.0, 602.0)
    assert draft.opening < 2 * draft.step


@pytest.mark.parametrize("steps", [1, LOOK_STEPS])
def test_a_step_that_was_disturbed_is_found_out_anew_by_looks(steps: int) -> None:
    """Whose first step reads what was accepted since the last one."""
    draft, cost = DraftCost(), Cost()
    for width in (1, 2):
        for _ in range(3):
            cost.observe_forward(1, width, 1.0)
    for _ in range(2):
        draft.observe_draft(3, 900.0, 2700.0)
    assert draft.step is not None and draft.step > 100
    rounds(draft, cost)
    assert rounds(draft.begin(), cost) <= (OWED + AT_HAND) / SHARE + 2
    draft.observe_draft(steps, 0.4, 0.4 + 0.1 * (steps - 1), usual=False)
    draft.observe_look(0.4)
    assert draft.step <= 0.4
    draft.allowance.left = 0.0
    assert rounds(draft.begin(), cost) < 100


def test_where_it_was_right_it_is_asked_once_more() -> None:
    """The text may be one on which it is right."""
    cost, draft = known(0.2)
    rounds(draft, cost)
    for kept in (1, 2, 1):
        draft.kept([kept], 0.4, cost, Advance())
        assert draft.asked(False, cost) == pytest.approx(0.4)
    draft.kept([0], 0.4, cost, Advance())
    draft.allowance.left = 0.5
    assert draft.asked(False, cost) is None, "charged twice its price behind one in vain"
    assert draft.asked(True, cost) == 0.0
    draft.kept([9], 0.0, cost, Advance())
    assert draft.allowance.left < 0.6 and draft.allowance.vain == 1, "it was no look"


@pytest.mark.parametrize(
    ("kept", "beside", "lockstep", "gained"),
    [
        ([1, 1, 0, 2], 0, False, 1.0),
        ([1, 1, 0, 2], 4, False, 0.5),
        ([1, 1, 1, 2], 0, True, 1.0),
        ([1, 0, 1], 0, True, 0),
    ],
    ids=["mean row", "beside others", "in step", "in step, one wrong"],
)
def test_what_a_batch_gains(kept: list[int], beside: int, lockstep: bool, gained: float) -> None:
    cost, draft = known(0.2)
    cost.beside = beside
    draft.kept(kept, 0.4, cost, Advance(lockstep))
    assert draft.allowance.left == gained
    draft.allowance.left = 0.0
    draft.kept(kept, 0.4, cost, Advance(lockstep, length=20))
    assert gained == draft.allowance.left == 0 or 0 < draft.allowance.left < gained, "its slowest row ends the call"


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize(("c", "slope"), [(0.1, 0.0), (0.3, 0.1), (0.6, 0.0), (0.6, 0.1), (1.5, 0.0)])
def test_looks_cost_a_fiftieth_of_the_time_however_often_they_are_right(c: float, slope: float, alpha: float) -> None:
    """Even where drafting is never said to pay. Seeded; 40,000 rounds, whose tokens have a standard deviation of less
    than half a percent."""
    cost, draft = known(c, slope)
    dice, tokens, seconds = random.Random(3), 0, 0.0
    for _ in range(40_000):
        price = draft.asked(False, cost)
        steps = LOOK_STEPS if price else 0
        kept = next((n for n in range(steps) if dice.random() >= alpha), steps)
        draft.kept([kept], price or 0.0, cost, Advance())
        tokens, seconds = tokens + kept + 1, seconds + 1 + steps * (c + slope)
    assert tokens / seconds >= 1 - 1.05 * SHARE


@pytest.mark.parametrize("seed", [0, 1], ids=["oracle", "adversary"])
@pytest.mark.parametrize(
    ("drafter", "sampled"),
    [
        (DraftModelDrafter, False),
        (DraftModelDrafter, True),
        (partial(HybridDrafter, min_match=8, num_recycled=0), True),
        (lambda draft: DiscoDrafter(draft, StopClassifier(10, 8)), False),
        (lambda draft: DiscoDrafter(draft, StopClassifier(10, 8)), True),
    ],
    ids=["step by step", "draws", "hybrid", "DISCO", "DISCO's draws"],
)
def test_sessions_say_what_was_kept_of_their_drafts(
    drafter: Callable[..., Drafter], sampled: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target as its own draft model, and one that has learned nothing. Of an oracle's rounds nearly all keep
    something; of the other's, few: tokens that are kept by chance."""
    told: list[bool] = []
    monkeypatch.setattr(DraftCost, "asked", lambda *_, **__: 0.5)
    monkeypatch.setattr(DraftCost, "kept", lambda self, tokens, price, *_: price and told.append(any(tokens)))
    target, inputs = models.llama(), models.prompts([5])
    options = {"max_new_tokens": 80, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    draft = target if seed == 0 else models.llama(seed=1)
    target.generate(**inputs, **options, assistant_model=drafter(draft))
    right = sum(told) / len(told)
    assert len(told) > 3 and (right > 0.7 if seed == 0 else right < 0.3)


def looks(draft: DraftCost, cost: Cost, count: int, rest: Rest | None = None) -> tuple[int, int]:
    """Rounds until there were so many looks in vain, and how many of them were thought about."""
    passed = thought = seen = 0
    while seen < count:
        passed += 1
        if rest is not None and rest.goes_on([0]):
            continue
        thought += 1
        if draft.asked(False, cost) is not None:
            seen += 1
        elif rest is not None:
            rest.begin([0])
    return passed, thought


def test_that_it_does_not_pay_holds_until_it_can_be_tried_again() -> None:
    """Looks come as often as where each round is thought about, and few rounds are."""
    cost, draft = known(0.1)
    wanted, every = looks(draft, cost, 5)
    cost, draft = known(0.1)
    passed, thought = looks(draft, cost, 5, Rest(draft))
    assert passed == pytest.approx(wanted, abs=5) and every == wanted
    assert thought <= 5 * 3 + passed / HOLDS
    assert draft.unasked == 0


def test_other_rows_and_other_sessions_are_thought_about_by_themselves() -> None:
    cost, draft = known(0.1)
    mine, other = Rest(draft), Rest(draft)
    assert draft.asked(False, cost) is None
    mine.begin([0, 1, 2])
    assert mine.goes_on([0, 1, 2])
    assert not other.goes_on([0, 1, 2])
    assert not mine.goes_on([0, 2])  # a row has left
    assert not mine.goes_on([0, 1, 3])  # and another one has come
    assert mine.goes_on([0, 1, 2])


def test_a_first_reading_that_was_slow_is_tried_again() -> None:
    draft = DraftCost()
    draft.observe_reading(100.0, 10)
    assert draft.reading == 10.0
    for _ in range(3):
        draft.begin()
    assert draft.reading == pytest.approx(10.0 / 8)
    draft.observe_reading(1.0, 10)
    assert draft.begin().begin().reading == pytest.approx(0.1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_session_thinks_seldom_about_drafts_that_do_not_pay(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model as slow as the target, that is never right."""
    thought: list[bool] = []
    kind, name = (BudgetedSession, "_pays") if sampled else (GrowingSession, "_steps_that_pay")
    method = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *told, **options: thought.append(True) or method(*told, **options))
    target, inputs = models.llama(), models.prompts([5])
    options = {"max_new_tokens": 200, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    drafter = DraftModelDrafter(models.llama(seed=1))
    for _ in range(2):
        thought.clear()
        target.generate(**inputs, **options, assistant_model=drafter)
    assert drafter.last_stats is not None and drafter.last_stats.target_calls > 100
    assert len(thought) < drafter.last_stats.target_calls / 2
