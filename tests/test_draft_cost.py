"""When a draft model is asked, and what that takes: looks are rare, and no disturbance spoils a figure for good."""

import itertools
import random

import pytest

from hf_specdec.budget import Cost, DraftCost
from hf_specdec.budget.draft_cost import GIVEN, LOOK_AGAIN, LOOK_STEPS, LOOKS, PAUSED, RAREST


def test_looks_are_rarer_where_they_take_long() -> None:
    cost, draft = Cost(), DraftCost()
    for _ in range(3):
        cost.observe_forward(1, 1, 1.0)
        draft.observe(0.1)
    draft.observe_reading(900.0, 10)  # a first one does not count
    assert draft.reading == 0.0
    draft.observe_reading(5.0, 10)  # a short one takes longer per token
    draft.observe_reading(4.0, 1000)
    draft.observe_reading(1.0, 0)
    assert draft.reading == pytest.approx(0.004)

    def rounds(unread: float) -> int:
        draft.unasked = draft.looks = draft.given = 0
        return next(n for n in itertools.count(1) if draft.asked(False, cost, 1, unread))

    assert rounds(0.0) < rounds(4.0) == pytest.approx(4.2 / 0.02, abs=1)
    draft.observe_look(2.0)  # what was accepted since the last one had to be read, too
    assert rounds(0.0) == pytest.approx(2.0 / 0.02, abs=1)
    assert rounds(4.0) == pytest.approx(6.0 / 0.02, abs=1)


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
    rounds = next(n for n in itertools.count(1) if draft.asked(False, cost))
    assert rounds <= RAREST
    draft.observe_draft(steps, 0.4, 0.4 + 0.1 * (steps - 1), usual=False)
    draft.observe_look(0.4)
    assert draft.step <= 0.4
    assert next(n for n in itertools.count(1) if draft.asked(False, cost)) < 100


def test_in_a_pause_nothing_is_decided_for_some_rounds_and_looks_come_all_the_same() -> None:
    draft, decided = DraftCost(), []
    for n in range(60):
        if not draft.pauses():
            decided.append(n)
            if draft.asked(False):
                break
    assert len(decided) <= 2 + n / PAUSED and LOOK_AGAIN <= n + 1 < LOOK_AGAIN + PAUSED
    draft.asked(True)
    assert not draft.pauses() and not draft.pauses()


def test_another_text_is_looked_at_as_often_as_the_first() -> None:
    """A draft model that was no good for one kind of text would stay unasked through many short ones of another."""
    draft = DraftCost()

    def rounds() -> int:
        return next(n for n in itertools.count(1) if draft.asked(False))

    assert [rounds() for _ in range(4)] == [LOOK_AGAIN, 2 * LOOK_AGAIN, 4 * LOOK_AGAIN, 4 * LOOK_AGAIN]
    assert draft.begin() is draft and rounds() == LOOK_AGAIN


def known(c: float) -> tuple[Cost, DraftCost]:
    """Of a target whose rounds take a second, and a draft model whose steps take c of it."""
    cost, draft = Cost(), DraftCost()
    for _ in range(3):
        for width in (1, 2, 3):
            cost.observe_forward(1, width, 1.0)
        draft.observe(c)
    return cost, draft


def test_a_new_draft_model_is_looked_at_before_that_is_earned() -> None:
    """It may have met a text first on which it was no good."""
    cost, draft = known(0.5)

    def rounds() -> int:
        return next(n for n in itertools.count(1) if draft.begin().asked(False, cost))

    assert [rounds() for _ in range(GIVEN + 2)] == [LOOK_AGAIN] * GIVEN + [LOOK_STEPS * 0.5 / LOOKS] * 2


def test_a_look_that_was_right_is_followed_by_another_one() -> None:
    cost, draft = known(0.2)
    while not draft.asked(False, cost):
        pass
    for _ in range(5):
        draft.observe_kept(1, 1)
        assert draft.asked(False, cost)
    draft.observe_kept(1, 2)  # of two rows only one
    assert not draft.asked(False, cost)
    draft.observe_kept(0, 0)  # nothing was drafted
    assert not draft.asked(False, cost)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("c", [0.1, 0.3, 0.6])
def test_looks_cost_a_fiftieth_of_the_time_however_often_they_are_right(c: float, alpha: float) -> None:
    """Even where drafting is never said to pay. Seeded; 40,000 rounds, whose tokens have a standard deviation of less
    than half a percent."""
    cost, draft = known(c)
    dice, tokens, seconds = random.Random(3), 0, 0.0
    for _ in range(40_000):
        steps = LOOK_STEPS if draft.asked(False, cost) else 0
        kept = next((n for n in range(steps) if dice.random() >= alpha), steps)
        draft.observe_kept(kept, int(steps > 0))
        tokens, seconds = tokens + kept + 1, seconds + 1 + steps * c
    assert tokens / seconds >= 1 - 1.05 * LOOKS
