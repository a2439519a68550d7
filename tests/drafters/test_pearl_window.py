"""PEARL's window by itself, and which schedule it takes."""

import random
from typing import Any

import models
import pytest
import torch
from compare import Sides
from laboratory import script

from hf_specdec import PearlDrafter
from hf_specdec.budget import Overlap
from hf_specdec.drafters.pearl.worker.call import WorkerCall
from hf_specdec.drafters.pearl.worker.workers import threads_beside
from hf_specdec.theory import pearl_tokens_per_second

bounds = script("pearl_bounds")


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 10])
def test_the_window_follows_the_speed_ratio(ratio):
    overlap = Overlap()
    for _ in range(40):
        overlap.observe_step(0.01)
        overlap.observe_forward(1, 3, 0.01 * ratio)
        overlap.observe_tests(4, 4, broken=False)
    plans = [overlap.plan(1) for _ in range(20)]
    assert plans[-1].window == ratio and plans[-1].overlapped


def test_low_acceptance_with_a_fast_draft_is_run_serially():
    overlap = Overlap()
    for _ in range(50):
        overlap.observe_step(0.01)
        overlap.observe_forward(1, 3, 0.1)
        overlap.observe_tests(4, 1, broken=True)
    plans = [overlap.plan(1) for _ in range(20)]
    assert not plans[-1].overlapped and plans[-1].window < 10


def test_the_formula_is_the_chains_long_run():
    generator = torch.Generator().manual_seed(0)
    cases = [(0.5, 0.5, 3, 3.0), (0.8, 0.8, 5, 3.0), (0.7, 0.7, 2, 5.0), (0.9, 0.9, 1, 1.0)]
    cases += [(0.9, 0.4, 5, 3.0), (0.6, 0.8, 3, 5.0), (0.9, 0.2, 1, 1.0)]
    for alpha, first, gamma, target, foreseen in [(*case, share) for case in cases for share in (0.0, 0.4)]:
        tokens, seconds, carried, broken = 0, 0.0, 0, False
        for _ in range(20000):
            tests = carried + 1
            chances = torch.full([tests], alpha)
            chances[0] = first if broken else alpha
            passed = int((torch.rand(tests, generator=generator) < chances).long().cumprod(0).sum())
            tokens += passed + (passed < tests)
            broken = passed < tests
            whole = passed == tests or bool(torch.rand((), generator=generator) < foreseen)
            seconds += max(target, gamma * 1.0) if whole else max(target, 1.0)
            carried = gamma - 1 if whole else 0
        speed = pearl_tokens_per_second(alpha, gamma, target, 1.0, foreseen, first)
        assert speed == pytest.approx(tokens / seconds, rel=0.03)


@pytest.mark.parametrize(("alpha", "first"), [(0.5, 0.5), (0.9, 0.4), (0.6, 0.8), (0.95, 0.1)])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_speed_that_turns_promise_is_their_long_run(alpha: float, first: float, gamma: int) -> None:
    """Of a draft that is right so often behind accepted tokens, and so often behind rejected ones."""
    dice, overlap = random.Random(0), Overlap(gamma, pre_verify=False, post_verify=False)
    for _ in range(3):
        overlap.observe_step(1.0, beside=False)
        overlap.observe_forward(1, gamma + 1, 4.0, beside=False)
    overlap.alpha = lambda broken=False: first if broken else alpha  # type: ignore[method-assign]
    tokens, broken = 0, False
    for _ in range(20_000):
        run = 0
        while run < gamma and dice.random() < (first if broken and not run else alpha):
            run += 1
        tokens, broken = tokens + run + 1, run < gamma
    assert overlap.plan(1).speed == pytest.approx(tokens / 20_000 / (4 + gamma), rel=0.03)


def test_the_two_rates_are_counted_apart():
    """A draft that is right behind accepted tokens, and wrong behind rejected ones."""
    overlap = Overlap()
    for _ in range(300):
        overlap.observe_tests(5, 5, broken=False)
        overlap.observe_tests(5, 0, broken=True)
        overlap.observe_tests(0, 0, broken=True)
    assert overlap.alpha() > 0.95 and overlap.alpha(broken=True) < 0.05


@pytest.mark.parametrize("window", [4, "auto"])
@pytest.mark.parametrize(
    ("foreseen", "step", "pays"), [(1, 1.0, True), (1, 3.0, False), (0, 1.02, True), (0, 1.1, False)]
)
def test_corrections_are_drafted_for_where_that_pays(foreseen, step, pays, window):
    overlap = Overlap(window, "auto")
    overlap.turns = False
    assert overlap.plan(1).corrections == 1
    dice = random.Random(0)
    broken = False
    for _ in range(400):
        accepted = dice.choice([0, 1, 2, 3, 4, 4, 4, 4])
        overlap.observe_step(1.0)
        overlap.observe_forward(1, 4, 4.0)
        overlap.observe_tests(4, accepted, broken)
        broken = accepted < 4
        for n in (1, 4):  # four are no better than one
            overlap.observe_step(step, corrections=n)
            overlap.observe_corrections(int(broken), foreseen * broken, n)
    plans = [overlap.plan(1).corrections for _ in range(1000)]
    tried = len(plans) - plans.count(1 if pays else 0)  # the others are tried now and then
    assert 5 <= tried <= 12


@pytest.mark.parametrize("window", [4, "auto"])
def test_four_corrections_are_drafted_for_where_they_are_foreseen_more_often(window) -> None:
    overlap, broken = Overlap(window, "auto"), False
    overlap.turns = False
    dice = random.Random(0)
    for _ in range(600):
        plan, accepted = overlap.plan(1), dice.choice([0, 1, 2, 3, 4, 4])
        overlap.observe_step(1.02 if plan.corrections else 1.0, corrections=plan.corrections)
        overlap.observe_forward(1, 4, 4.0)
        overlap.observe_tests(4, accepted, broken)
        broken = accepted < 4
        if plan.corrections:
            share = {1: 0.3, 4: 0.6}[plan.corrections]
            overlap.observe_corrections(int(broken), int(broken and dice.random() < share), plan.corrections)
    plans = [overlap.plan(1).corrections for _ in range(300)]
    assert plans.count(4) > 280


def texts(kind: str) -> list[tuple[bool, bool]]:
    """Of each token whether a draft of it is accepted, and whether the correction is foreseen otherwise."""
    dice, text = random.Random(0), []
    for i in range(3000):
        alpha = {"seldom": 0.4, "often": 0.7, "nearly always": 0.9, "in bursts": 0.97 if i // 12 % 2 else 0.3}[kind]
        text.append((dice.random() < alpha, dice.random() < 0.25))
    return text


def play(overlap: Overlap, text: list[tuple[bool, bool]], ratio: float, slowed: float = 1.0) -> float:
    """Seconds without overhead, where it is told what a session tells it. A draft step takes a second, and `slowed`
    beside the target, which is slowed down as much."""
    at = carried = 0
    seconds, broken = 0.0, False
    for _ in range(2):  # a call begins with plain rounds, as what drafting gains is held against them
        overlap.observe_forward(1, 1, ratio, beside=False)
    while at < len(text):
        plan, left = overlap.plan(1), len(text) - at - 1
        step = slowed * (1.05 if plan.corrections else 1.0)
        fresh = max(0, min(plan.window, left - carried))
        if not plan.overlapped:
            if not carried:
                carried, seconds = fresh, seconds + fresh
                overlap.observe_step(1.0, beside=False)
            fresh = 0
        tests = carried + bool(fresh)
        run = next((i for i in range(tests) if not text[at + i][0]), tests)
        foreseen = run < tests and plan.corrections > 0 and text[at + run][1]
        if plan.corrections:
            overlap.observe_corrections(int(run < tests), int(foreseen), plan.corrections)
        goes_on = bool(fresh) and (run == tests or foreseen)
        at += run + (run < tests or not fresh)
        verifying = ratio * (slowed if fresh else 1.0)
        seconds += max(verifying, step * (fresh if goes_on else min(fresh, 1)))
        carried = fresh - 1 if goes_on else 0
        if plan.overlapped:
            overlap.observe_step(step, corrections=plan.corrections)
        overlap.observe_forward(1, tests + 1, verifying, beside=bool(fresh))
        overlap.observe_tests(tests, run, broken)
        broken = run < tests if tests else broken
    return seconds


@pytest.mark.grid
@pytest.mark.parametrize("slowed", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("ratio", [2, 3, 5, 10, 20])
@pytest.mark.parametrize("kind", ["seldom", "often", "nearly always", "in bursts"])
def test_the_automatic_schedule_keeps_up_with_the_better_fixed_one(kind, ratio, slowed):
    """On cores that both models use, too, where each slows the other down while they run side by side."""
    text = texts(kind)
    accepted = [[float(passed) for passed, _ in text]]
    serial = min(bounds.serial_seconds(accepted, window, ratio, 1.0) for window in bounds.WINDOWS)
    overlapped = min(play(Overlap(ratio, n), text, ratio, slowed) for n in (0, 1))
    assert play(Overlap("auto", "auto"), text, ratio, slowed) < min(serial, overlapped) / 0.96


@pytest.mark.grid
@pytest.mark.parametrize("ratio", [1.5, 2.5, 3.5])
@pytest.mark.parametrize("kind", ["seldom", "often", "nearly always", "in bursts"])
def test_between_two_windows_the_faster_one_is_taken(kind: str, ratio: float) -> None:
    """To round the ratio would not do: a target that waits a little may gain more than it loses."""
    text = texts(kind)
    accepted = [[float(passed) for passed, _ in text]]
    serial = min(bounds.serial_seconds(accepted, window, ratio, 1.0) for window in bounds.WINDOWS)
    overlapped = min(play(Overlap(window), text, ratio) for window in range(1, 7))
    assert play(Overlap(), text, ratio) < min(serial, overlapped) / 0.97


def test_a_worker_reads_no_prompt_while_drafting_does_not_pay(monkeypatch: Any) -> None:
    """Nor does it matter to the text when it does: a draw's number does not tell of it."""
    opened: list[int] = []
    opening = WorkerCall.open

    def counted(self: WorkerCall) -> None:
        opened.append(self._setup is not None)
        opening(self)

    monkeypatch.setattr(WorkerCall, "open", counted)
    sides = Sides(models.llama(), [9], max_new_tokens=24, do_sample=True)
    texts = []
    for resting in (False, True):
        with PearlDrafter(models.llama(seed=3), window=3, worker="thread") as drafter:
            drafter.planners.of(sides.model, (1, True)).resting = resting
            torch.manual_seed(3)
            texts.append(sides.ours(drafter))
        assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0
    assert torch.equal(*texts)
    assert sum(opened) == 2


def test_a_call_too_short_to_tell_leaves_the_next_ones_worker_alone() -> None:
    sides = Sides(models.llama(), [9], max_new_tokens=2)
    with PearlDrafter(models.llama(seed=3), worker="thread") as drafter:
        sides.ours(drafter)
        assert not drafter.planners.of(sides.model, (1, False)).resting


@pytest.mark.parametrize(("mine", "cores", "device", "expected"), [
    (2, 2, "cpu", 1), (6, 8, "cpu", 2), (2, 16, "cpu", 2), (8, 8, "cpu", 1), (8, 8, "meta", 8),
])  # fmt: skip
def test_a_worker_computes_on_the_cores_that_the_target_leaves(
    mine: int, cores: int, device: str, expected: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: mine)
    assert threads_beside(torch.device(device)) == expected
