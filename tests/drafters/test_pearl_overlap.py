"""PEARL's decisions: what is carried, drafted and tested, and what comes next."""

import itertools

import pytest

from hf_specdec.budget.overlap import Plan
from hf_specdec.drafters.pearl.overlap import Part, drafted_first, in_step, outcomes, part
from hf_specdec.drafters.pearl.token import DraftToken, DraftTokens

BOTH = Plan(3, pre_verify=True, post_verify=True, corrections=0)
PLANS = [Plan(3, pre, post, 0) for pre, post in itertools.product([True, False], repeat=2)]


def chain(*tokens: int) -> DraftTokens:
    return [DraftToken(token) for token in tokens]


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
        now = part(BOTH, carried, 100)
        assert now.wanted == 3
        now = now._replace(fresh=fresh)
        passed, rejected = outcomes([now], [accepted], [False], lockstep=False)
        assert bool(passed) != bool(rejected)
        strategy = "post-verify" if now.carried else "pre-verify"
        seen.append((strategy, [one.token for one in now.tested], bool(passed)))
        carried = fresh[1:] if passed else chain()
    assert seen == [
        ("pre-verify", [1], False),
        ("pre-verify", [4], True),
        ("post-verify", [5, 6, 7], True),
        ("post-verify", [8, 9, 10], False),
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("carried", [chain(), chain(7), chain(7, 8)], ids=len)
@pytest.mark.parametrize("room", range(2, 7))
def test_a_part_keeps_to_the_plan_and_to_the_room(plan: Plan, carried: DraftTokens, room: int) -> None:
    now = part(plan, carried, room)
    assert now.carried == carried and len(carried) + now.wanted <= room
    allowed = plan.post_verify or (plan.pre_verify and not carried)
    assert now.wanted == (min(3, room - len(carried)) if allowed and len(carried) < room else 0)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_only_without_pre_verify_a_row_waits_for_a_draft(plan: Plan) -> None:
    first = drafted_first(plan, [chain(), chain(7), chain(), chain()], [9, 9, 2, 0])
    assert first == ([0] * 4 if plan.pre_verify else [3, 0, 2, 0])


@pytest.mark.parametrize("carried", range(4))
@pytest.mark.parametrize("fresh", range(4))
def test_every_outcome_follows_from_the_tests(carried: int, fresh: int) -> None:
    now = Part(chain(*range(carried)), 3, chain(*range(fresh)))
    tests = len(now.tested)
    assert tests == carried + min(fresh, 1)
    for accepted in range(tests + 1):
        assert outcomes([now], [accepted], [True], lockstep=False) == ([], [])
        rejected = accepted < tests
        expected = ([0] if fresh and not rejected else [], [0] if rejected else [])
        assert outcomes([now], [accepted], [False], lockstep=False) == expected


@pytest.mark.parametrize("passive", [(a, b) for a in (False, True) for b in (False, True)], ids=str)
def test_rows_in_lockstep_carry_and_draft_as_much_as_each_other(passive: tuple[bool, bool]) -> None:
    parts = in_step([Part(chain(1, 2, 3), 2), Part(chain(4, 5), 3), Part(chain(6), 1)], [*passive, False])
    assert {(len(part.carried), part.wanted) for part in parts} == {(1, 1)}
    parts = in_step([Part(chain(1, 2, 3), 2), Part(chain(), 0)], [False, True])
    assert parts[0] == Part(chain(1, 2, 3), 2)


ROWS = {"passed": (1, False), "rejected": (0, False), "stopped": (1, True)}


@pytest.mark.parametrize("rows", list(itertools.product(ROWS, repeat=3)), ids=str)
def test_one_rejection_ends_the_round_for_all_rows_in_lockstep(rows: tuple[str, ...]) -> None:
    accepted, stopped = zip(*(ROWS[row] for row in rows), strict=True)
    passed, rejected = outcomes([Part((), 3, chain(1, 2))] * 3, accepted, stopped, lockstep=True)
    assert [rows[b] for b in rejected] == ["rejected"] * rows.count("rejected")
    assert [rows[b] for b in passed] == ["passed"] * (0 if rejected else rows.count("passed"))
