"""PEARL's decisions: what is carried, drafted and tested, and what comes next."""

import itertools

import pytest

from hf_specdec.drafters.pearl.overlap import (
    Chain,
    Drafted,
    Mode,
    Outcome,
    Plan,
    Turn,
    drafted_first,
    in_step,
    together,
    turn,
)

BOTH = Plan(3, pre_verify=True, post_verify=True, corrections=0)
PLANS = [Plan(3, pre, post, 0) for pre, post in itertools.product([True, False], repeat=2)]


def chain(*tokens: int) -> Chain:
    return [Drafted(token) for token in tokens]


def test_figure_3() -> None:
    """The paper's example, T = 0 to 9t: y1, x4 x5 x6 x7 x8, y2."""
    rounds = [  # drafted meanwhile, accepted
        (chain(1, 2, 3), 0),
        (chain(4, 5, 6), 1),
        (chain(7, 8, 9), 3),
        (chain(10, 11, 12), 1),
    ]
    carried, seen = chain(), []
    for fresh, accepted in rounds:
        now = turn(BOTH, carried, 100)
        assert now.wanted == 3
        tested = [place.token for place in now.tested(fresh)]
        outcome = now.outcome(fresh, accepted, stopped=False)
        seen.append((now.mode, tested, outcome))
        carried = fresh[1:] if outcome is Outcome.PASSED else chain()
    assert seen == [
        (Mode.PRE_VERIFY, [1], Outcome.REJECTED),
        (Mode.PRE_VERIFY, [4], Outcome.PASSED),
        (Mode.POST_VERIFY, [5, 6, 7], Outcome.PASSED),
        (Mode.POST_VERIFY, [8, 9, 10], Outcome.REJECTED),
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("carried", [chain(), chain(7), chain(7, 8)], ids=len)
@pytest.mark.parametrize("room", range(2, 7))
def test_a_turn_keeps_to_the_plan_and_to_the_room(plan: Plan, carried: Chain, room: int) -> None:
    now = turn(plan, carried, room)
    assert now.carried == carried and len(carried) + now.wanted <= room
    if len(carried) < room:
        allowed = plan.post_verify or (plan.pre_verify and not carried)
        assert now.mode is (Mode.SERIAL if not allowed else Mode.POST_VERIFY if carried else Mode.PRE_VERIFY)
        assert now.wanted == (min(3, room - len(carried)) if allowed else 0)
    else:
        assert now.mode is Mode.SERIAL


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_only_without_pre_verify_a_row_waits_for_a_draft(plan: Plan) -> None:
    first = drafted_first(plan, [chain(), chain(7), chain(), chain()], [9, 9, 2, 0])
    assert first == ([0] * 4 if plan.pre_verify else [3, 0, 2, 0])


@pytest.mark.parametrize("carried", range(4))
@pytest.mark.parametrize("fresh", range(4))
def test_every_outcome_follows_from_the_tests(carried: int, fresh: int) -> None:
    now, drafted = Turn(chain(*range(carried)), 3), chain(*range(fresh))
    tests = len(now.tested(drafted))
    assert tests == carried + min(fresh, 1)
    for accepted in range(tests + 1):
        assert now.outcome(drafted, accepted, stopped=True) is Outcome.OVER
        expected = Outcome.REJECTED if accepted < tests else Outcome.PASSED if fresh else Outcome.OVER
        assert now.outcome(drafted, accepted, stopped=False) is expected


@pytest.mark.parametrize("passive", [(a, b) for a in (False, True) for b in (False, True)], ids=str)
def test_rows_in_lockstep_carry_and_draft_as_much_as_each_other(passive: tuple[bool, bool]) -> None:
    turns = in_step([Turn(chain(1, 2, 3), 2), Turn(chain(4, 5), 3), Turn(chain(6), 1)], [*passive, False])
    assert {(len(turn.carried), turn.wanted) for turn in turns} == {(1, 1)}
    turns = in_step([Turn(chain(1, 2, 3), 2), Turn(chain(), 0)], [False, True])
    assert turns[0] == Turn(chain(1, 2, 3), 2)


@pytest.mark.parametrize("outcomes", list(itertools.product(Outcome, repeat=3)), ids=str)
def test_one_rejection_ends_the_round_for_all_rows_in_lockstep(outcomes: tuple[Outcome, ...]) -> None:
    found = together(outcomes)
    assert [outcome is Outcome.REJECTED for outcome in found] == [outcome is Outcome.REJECTED for outcome in outcomes]
    assert Outcome.REJECTED not in found or Outcome.PASSED not in found
    assert Outcome.REJECTED in found or found == list(outcomes)
