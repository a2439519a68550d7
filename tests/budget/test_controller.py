"""The controller: drafts that promise to pay are free, others are tried as far as the account allows."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides, uneven_eos
from models import VOCAB, llama
from toy_drafters import context

from hf_specdec import Drafter, DraftModelDrafter, HybridDrafter, theory
from hf_specdec.budget import (
    DRAFTED,
    LONGEST,
    LOOK,
    Account,
    Controller,
    Cost,
    CostView,
    DraftCost,
    Drafted,
    Evidence,
    Experience,
)
from hf_specdec.budget.account import SHARE
from hf_specdec.budget.controller import UNMEASURED
from hf_specdec.budget.cost import KEPT
from hf_specdec.drafters import rules
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.drafters.draft_model import ModelDraft
from hf_specdec.drafters.rules import Stepwise
from hf_specdec.protocol import DraftContext, Sequences, Verdict

Verify = Callable[[int], float]


def at(rows: int = 1, lockstep: bool = False, length: int = 40, verify: Verify | None = None) -> DraftContext:
    """A call whose target's forwards are known; of no length, where rows come and go."""
    prompt = torch.full((rows, 3), 5)
    known = dict(prompt_ids=prompt, prompt_mask=torch.ones_like(prompt), max_length=3 + length, lockstep=lockstep)
    made = context(**known, vocab_size=VOCAB, most_rows=0 if length else rows)
    return with_times(made, rows, lambda width: 1.0 if verify is None else verify(width))


def with_times(made: DraftContext, rows: int, verify: Verify, beside: int = 0) -> DraftContext:
    """Its target's forwards take these times, over its rows and those beside them."""
    cost = Cost()
    for _ in range(9):
        for width in (1, 3, 9, 17):
            cost.observe_forward(rows + beside, width, verify(width))
    made.cost = CostView(cost, beside)
    return made


def knowing(c: float, alpha: float | None = None, candidates: int = 1) -> Experience:
    """A draft model whose steps take c, and how often its first candidate is right; the next ones are half the time, if
    those before them are wrong."""
    known, dice = Experience(), random.Random(0)
    for _ in range(3):
        known.cost.observe(3, c, 3 * c)
    for _ in range(4000 if alpha is not None else 0):
        right = dice.random() < (alpha or 0.0)
        for rank in range(candidates):
            known.acceptance.observe(Evidence.of(DRAFTED, rank), right)
            right = not right and dice.random() < 0.5
    return known


def nothing(rows: int = 1, unread: int = 0) -> Drafted:
    return Drafted(list(range(rows)), [[]] * rows, [1.0] * rows, unread=unread, left=40)


def told(accepted: list[int], drafted: list[int]) -> Verdict:
    texts = [[5] * (n + 1) for n in accepted]
    return Verdict(list(range(len(accepted))), drafted, accepted, texts, [False] * len(accepted), 1, 1.0)


# ---------------------------------------------------------------------- how many steps


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("c", [0.02, 0.2, 0.5, 1.5])
def test_a_window_is_theorem_3_8s_where_width_costs_nothing(alpha: float, c: float) -> None:
    control = Controller(at(), knowing(c, alpha))
    assert control.alpha() == pytest.approx(alpha, abs=0.12)
    control.account.left = 0.0
    gamma = control.plan(nothing(), LONGEST, enough=LONGEST)
    best = theory.best_window(control.alpha(), lambda width: 1.0, c, LONGEST)
    speed = partial(theory.tokens_per_second, control.alpha(), target_seconds=lambda width: 1.0, draft_seconds=c)
    assert speed(gamma=gamma) >= 0.97 * speed(gamma=best)


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.3])
def test_it_counts_what_candidates_cost_and_gain(slope: float) -> None:
    control = Controller(at(verify=lambda width: 1 + slope * width), knowing(0.05, 0.6, 3), candidates=3)
    control.account.left = 0.0
    alphas = [control.alpha(rank) for rank in range(3)]

    def speed(gamma: int) -> float:
        gained = 1 + sum(sum(alphas) * alphas[0] ** i for i in range(gamma))
        return gained / (1 + slope * (3 * gamma + 1) + 0.05 * gamma)

    gamma = control.plan(nothing(), LONGEST, enough=LONGEST)
    assert speed(gamma) >= 0.97 * max(map(speed, range(LONGEST + 1)))


def test_a_batch_that_waits_for_its_slowest_row_drafts_less() -> None:
    """What a row gains is lost in part where another is luckless, and nearly all of it where rows advance in step."""
    found = []
    for how in (at(4, length=0), at(4, length=32), at(4, lockstep=True)):
        with_times(how, 4, lambda width: 1 + 0.05 * width)
        control = Controller(how, knowing(0.1, 0.3))
        control.account.left = 0.0
        found.append(control.plan(nothing(4), LONGEST, enough=LONGEST))
    assert found[0] > 0 and found == sorted(found, reverse=True) and found[2] == 0


def test_before_anything_was_measured_a_few_steps_are_made() -> None:
    control = Controller(context(), Experience())
    assert (
        control.plan(nothing(), LONGEST)
        == UNMEASURED
        == 1 + sum(control.goes_on(Drafted([0], [[]], [1.0], steps)) for steps in range(1, LONGEST))
    )


def test_a_window_that_the_user_has_set_is_drafted_whatever_it_costs() -> None:
    control = Controller(at(), knowing(9.0, 0.0), fixed=5)
    for _ in range(30):
        assert control.plan(nothing(), LONGEST) == 5 and control.plan(nothing(), 3) == 3
        control.observe([0], told([0], [5]))
    assert control.notes() == [] and control.longest == 5


# ---------------------------------------------------------------------- when it is asked


def tries(control: Controller, count: int, kept: int = 0) -> list[int]:
    """Rounds to each of so many tries, of which each keeps so many tokens."""
    found, waited = [], 0
    while len(found) < count:
        steps, waited = control.plan(nothing(), LONGEST), waited + 1
        control.observe([min(kept, steps)], told([min(kept, steps)], [steps]))
        if steps:
            found.append(waited)
            waited = 0
    return found


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("c", [0.2, 0.5])
def test_tries_are_as_rare_as_they_are_dear(c: float, slope: float) -> None:
    control = Controller(at(verify=lambda width: 1 + slope * (width - 1)), knowing(c, 0.0))
    control.account.left = 0.0
    price = LOOK * (c + slope)
    assert tries(control, 3) == pytest.approx([price / SHARE] * 3, abs=3)


def test_what_has_to_be_read_first_is_a_part_of_the_price() -> None:
    known = knowing(0.2, 0.0)
    known.cost.observe_reading(5.0, 10)  # a short one takes longer per token
    known.cost.observe_reading(4.0, 1000)
    known.cost.observe_reading(1.0, 0)
    assert known.cost.reading == pytest.approx(0.004)
    control = Controller(at(), known)
    control.account.left = LOOK * 0.2 + 0.5
    assert control.plan(nothing(unread=250), LONGEST) == 0
    assert Controller(at(), known).plan(nothing(unread=0), LONGEST) == LOOK


def test_where_it_was_right_it_is_asked_again_at_once() -> None:
    """The text may be one on which it is right."""
    control = Controller(at(), knowing(0.2, 0.0))
    control.account.left = 0.4
    assert tries(control, 4, kept=1) == [1] * 4


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
    rows = len(kept)
    for length in (0, 20):
        how = with_times(at(rows, lockstep, length), rows, lambda width: 1.0, beside)
        control = Controller(how, knowing(0.2, 0.0))
        control.account.left = 2.0
        assert control.plan(nothing(rows), LONGEST) == LOOK
        control.observe(kept, told(kept, [LOOK] * rows))
        found = control.account.left - (2.0 + SHARE - 0.4)
        if length == 0:
            assert found == pytest.approx(gained, abs=1e-6)
        else:
            assert gained == found == pytest.approx(0) or -1e-6 <= found <= gained + 1e-6, (
                "its slowest row ends the call"
            )


@pytest.mark.grid
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize(("c", "slope"), [(0.1, 0.0), (0.3, 0.1), (0.6, 0.0), (1.5, 0.0)])
def test_tries_cost_a_share_of_the_time_however_often_they_are_right(c: float, slope: float, alpha: float) -> None:
    """Even where drafting is never said to pay. Seeded; 20,000 rounds, whose tokens have a standard deviation of less
    than half a percent."""
    control, dice = Controller(at(verify=lambda width: 1 + slope * (width - 1)), knowing(c, 0.0)), random.Random(3)
    tokens, seconds = 0, 0.0
    for _ in range(20_000):
        steps = control.plan(nothing(), LONGEST)
        kept = next((n for n in range(steps) if dice.random() >= alpha), steps)
        control.observe([kept], told([kept], [steps]))
        tokens, seconds = tokens + kept + 1, seconds + 1 + steps * (c + slope)
    assert tokens / seconds >= 1 - 2 * SHARE


def test_that_it_does_not_pay_holds_until_it_can_be_tried_again(monkeypatch: Any) -> None:
    """Few rounds are thought about, and only for the same rows, where nobody else drafts."""
    control, thought = Controller(at(3), knowing(0.5, 0.0)), []
    control.account.left = 0.0
    weigh = Controller._steps_that_pay

    def watched(*known: Any, **how: Any) -> int:
        thought.append(True)
        return weigh(*known, **how)

    monkeypatch.setattr(
        Controller, "_steps_that_pay", lambda *known, **how: thought.append(True) or weigh(*known, **how)
    )
    for _ in range(80):
        assert control.plan(nothing(3), LONGEST) == 0
    assert len(thought) <= 80 / KEPT + 1
    before = len(thought)
    control.plan(Drafted([0, 2], [[]] * 2, [1.0] * 2), LONGEST)
    control.plan(Drafted([0, 1, 2], [[0.5], [], []], [1.0] * 3), LONGEST)
    assert len(thought) == before + 2


def test_nothing_is_drafted_in_a_round_that_is_to_be_plain(monkeypatch: Any) -> None:
    control = Controller(at(), knowing(0.01, 0.9))
    monkeypatch.setattr(type(control.context.cost), "tried", lambda *_: 0)
    assert control.plan(nothing(), LONGEST) == 0
    control.observe([0], told([0], [0]))
    assert control.notes() == []


# ---------------------------------------------------------------------- what steps take


def test_what_opens_a_draft_is_no_step_of_it() -> None:
    """A first step reads what was accepted meanwhile: a longer window does not pay for that again."""
    cost = DraftCost()
    for steps in (3, 3, 1, 4, 1):
        cost.observe(steps, 1.5, 1.5 + steps - 1)
    assert (cost.step, cost.opening) == pytest.approx((1.0, 0.5))
    cost.observe(2, 40.0, 41.0, usual=False)  # and read much behind a pause
    assert (cost.step, cost.opening) == pytest.approx((1.0, 0.5))
    for _ in range(9):
        cost.observe(1, 0.5, 0.5)  # a step that was measured as too long comes down where one is drafted alone, too
    assert cost.step == pytest.approx(0.5)


def test_c_is_said_over_a_plain_step_of_the_target() -> None:
    """Leviathan et al. 2023, Definition 3.7, with what opens a draft."""
    cost = DraftCost()
    for _ in range(3):
        cost.observe(3, 1.5, 3.5)
    assert cost.c(at(verify=lambda width: 3.0 * width).cost, 1) == pytest.approx((1.0 + 0.5) / 3.0)


@pytest.mark.parametrize("disturbed", [5.0, 1e6])
def test_a_disturbance_hardly_moves_a_figure(disturbed: float) -> None:
    cost = DraftCost()
    for _ in range(8):
        cost.observe(3, 1.5, 3.5)
    for _ in range(3):
        cost.observe(3, disturbed, 3 * disturbed)
    assert (cost.step, cost.opening) == pytest.approx((1.0, 0.5))


# ---------------------------------------------------------------------- in sessions


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
def test_auto_gives_plains_text(lengths: list[int]) -> None:
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    sides = Sides(model, lengths, max_new_tokens=60)
    drafter = DraftModelDrafter(draft)
    assert drafter.config.num_draft_tokens == "auto"
    assert all(torch.equal(sides.ours(drafter), sides.plain) for _ in range(2))


@pytest.mark.parametrize("lengths", [[3], PROMPTS])
@pytest.mark.parametrize("kind", ["draft_model", "disco"])
@pytest.mark.eager  # a recorded draft goes on to its end
def test_a_draft_ends_at_an_eos(kind: str, lengths: list[int]) -> None:
    model, width = models.llama(), 16
    sides = Sides(model, lengths, eos_token_id=uneven_eos(model, lengths, at=(6,) * len(lengths)))
    drafter: Any = DraftModelDrafter(model, num_draft_tokens=width)
    if kind == "disco":
        drafter = DiscoDrafter(model, StopClassifier(4, 8), rule="token", tau=1e-9, max_draft_tokens=width)
    assert torch.equal(sides.ours(drafter), sides.plain)
    assert drafter.last_stats is not None and drafter.last_stats.draft_calls <= 1 + 6


@pytest.mark.parametrize("do_sample", [False, True])
def test_on_an_accelerator_windows_are_chosen_before_they_are_drafted(do_sample: bool, monkeypatch: Any) -> None:
    """Each look at a token would be waited for."""
    monkeypatch.setattr("hf_specdec.drafters.draft_model.model_draft.waits", lambda _: True)
    target, drafter = llama(), DraftModelDrafter(llama(seed=1))
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 30, "do_sample": do_sample, "pad_token_id": 0}
    planned: list[int] = []
    monkeypatch.setattr(Controller, "plan", lambda self, drafted, most, enough: planned.append(enough) or 3)
    text = target.generate(ids, **options, assistant_model=drafter)
    assert planned and min(planned) >= 1 and max(drafter.last_stats.verify_widths) == 4
    if not do_sample:
        assert torch.equal(text, target.generate(ids, **options))


def test_what_is_behind_another_rows_mistake_was_not_wrong() -> None:
    """In lockstep a round ends for all rows where one is wrong: of the others' tokens behind nothing is known."""
    verdict = Verdict([0, 1], [4, 4], [2, 1], [[5, 6], [5, 9]], [False, False], 5, 1.0)
    assert rules.tested(verdict) == [2, 2]
    control, before = Controller(at(2), Experience()), Experience()
    control.observe_chains(verdict)
    for right in (True, True, True, False):
        before.acceptance.observe(Evidence.of(DRAFTED), right)
    assert control.alpha() == Controller(at(2), before).alpha()


def test_finished_rows_do_not_keep_others_from_drafting() -> None:
    """Those of a lockstep batch stay in it, and draft nothing."""
    how = at(3, lockstep=True)
    how.do_sample, how.pick = True, lambda ids, columns, rows, logits: (logits.argmax(-1), logits.softmax(-1))  # type: ignore[assignment]
    known = knowing(0.01, 0.99)
    for _ in range(200):
        for band in range(13):
            known.acceptance.observe(Evidence.of(DRAFTED)._replace(band=band), True)
    rule = Stepwise(Controller(how, known, longest=6))
    session = ChainSession(how, ModelDraft(how, llama(seed=1), DraftCost()), rule)
    ids = torch.nn.functional.pad(torch.cat([how.prompt_ids, torch.full((3, 1), 8)], 1), (0, 16))
    with torch.no_grad():
        draft = session.propose(Sequences(ids, [4] * 3, [0, 1, 2], ids[:, :4].tolist()), [9, 0, 9])
    assert draft.lengths[0] == draft.lengths[2] == 6
    assert [len(seen) for seen in rule.seen] == draft.lengths  # the last one is learned from, too


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
    gained: list[bool] = []
    monkeypatch.setattr(Controller, "_steps_that_pay", lambda *_, **__: 0)
    monkeypatch.setattr(Controller, "_price_of_try", lambda *_: 0.5)
    monkeypatch.setattr(Account, "missing", lambda *_: 0)
    monkeypatch.setattr(Account, "charge", lambda self, lost: gained.append(lost < 0.49))
    target, inputs = models.llama(), models.prompts([5])
    options = {"max_new_tokens": 80, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    draft = target if seed == 0 else models.llama(seed=1)
    target.generate(**inputs, **options, assistant_model=drafter(draft))
    right = sum(gained) / len(gained)
    assert len(gained) > 3 and (right > 0.7 if seed == 0 else right < 0.3)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_session_thinks_seldom_about_drafts_that_do_not_pay(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model as slow as the target, that is never right."""
    thought: list[bool] = []
    weigh = Controller._steps_that_pay

    def watched(*known: Any, **how: Any) -> int:
        thought.append(True)
        return weigh(*known, **how)

    monkeypatch.setattr(
        Controller, "_steps_that_pay", lambda *known, **how: thought.append(True) or weigh(*known, **how)
    )
    target, inputs = models.llama(), models.prompts([5])
    options = {"max_new_tokens": 200, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    drafter = DraftModelDrafter(models.llama(seed=1))
    for _ in range(2):
        thought.clear()
        target.generate(**inputs, **options, assistant_model=drafter)
    assert drafter.last_stats is not None and drafter.last_stats.target_calls > 100
    assert len(thought) < drafter.last_stats.target_calls / 2
