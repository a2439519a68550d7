"""PEARL's window by itself, and which schedule it takes."""

import random
from typing import Any

import models
import numpy as np
import pytest
import torch
from compare import Sides

from hf_specdec import PearlDrafter
from hf_specdec.drafters.pearl.history import LONGEST, History, overlapped_speeds, serial_speeds
from hf_specdec.drafters.pearl.window import Planner
from hf_specdec.drafters.pearl.worker import Conversation
from hf_specdec.drafters.pearl.worker.process import threads_beside
from hf_specdec.theory import pearl_tokens_per_second, tokens_per_second
from pearl_bounds import WINDOWS, serial_seconds


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 10])
def test_the_window_follows_the_speed_ratio(ratio):
    planner = Planner("auto", True, True)
    for _ in range(20):
        planner.saw_draft(1, 0.01)
        planner.saw_target(1, 3, 0.01 * ratio)
        planner.history.saw_tests([0], [4], [4])
    assert planner.plan(1).window == ratio
    assert planner.plan(1).pre_verify and planner.plan(1).post_verify


def test_low_acceptance_with_a_fast_draft_is_run_serially():
    planner = Planner("auto", True, True)
    for _ in range(50):
        planner.saw_draft(1, 0.01)
        planner.saw_target(1, 3, 0.1)
        planner.history.saw_tests([0], [4], [1])
    plan = planner.plan(1)
    assert not plan.pre_verify and not plan.post_verify and plan.window < 10


def test_the_formula_is_the_chains_long_run():
    generator = torch.Generator().manual_seed(0)
    cases = [(0.5, 3, 3.0, 1.0), (0.8, 5, 3.0, 1.0), (0.7, 2, 5.0, 1.0), (0.9, 1, 1.0, 1.0)]
    for alpha, gamma, target, draft, foreseen in [(*case, share) for case in cases for share in (0.0, 0.4)]:
        tokens, seconds, carried = 0, 0.0, 0
        for _ in range(20000):
            tests = carried + 1
            passed = int((torch.rand(tests, generator=generator) < alpha).long().cumprod(0).sum())
            tokens += passed + (passed < tests)
            whole = passed == tests or bool(torch.rand((), generator=generator) < foreseen)
            seconds += max(target, gamma * draft) if whole else max(target, draft)
            carried = gamma - 1 if whole else 0
        speed = pearl_tokens_per_second(alpha, gamma, target, draft, foreseen)
        assert speed == pytest.approx(tokens / seconds, rel=0.03)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_independent_acceptances_give_the_formulas_speeds(gamma, alpha):
    runs = np.random.default_rng(0).geometric(1 - alpha, 20000) - 1
    for foreseen in (0.0, 0.5):
        (speed,) = overlapped_speeds(runs, [gamma], lambda width: 3.0, 1.0, foreseen)
        assert speed == pytest.approx(pearl_tokens_per_second(alpha, gamma, 3.0, 1.0, foreseen), rel=0.02)
    (speed,) = serial_speeds(runs, [gamma], lambda width: 2.0 + width, 1.0)
    assert speed == pytest.approx(tokens_per_second(alpha, gamma, lambda width: 2.0 + width, 1.0), rel=0.02)


def test_runs_of_two_rows_are_kept_apart_and_end_with_their_texts():
    history = History()
    before = len(history.runs)
    history.saw_tests([0, 1], [3, 3], [3, 1])
    history.saw_tests([0, 1], [3, 0], [3, 0])
    assert history.runs.tolist()[before:] == [1, 6]
    history.saw_tests([0, 1], [3, 3], [2, 3])
    history.end_texts()
    history.saw_tests([1], [3], [2])
    assert history.runs.tolist()[before:] == [1, 8, 3, 2]


def test_a_draft_that_is_never_corrected_outweighs_nothing():
    history = History()
    for _ in range(50_000):
        history.saw_tests([0], [4], [4])
        history.saw_corrections(0, 0)
    assert history.foreseen == 0.25 and history.runs.max() == LONGEST


@pytest.mark.parametrize("window", [4, "auto"])
@pytest.mark.parametrize(
    ("foreseen", "step", "pays"), [(1, 1.0, True), (1, 3.0, False), (0, 1.02, True), (0, 1.1, False)]
)
def test_corrections_are_drafted_for_where_that_pays(foreseen, step, pays, window):
    planner = Planner(window, True, True, "auto")
    assert planner.plan(1).corrections == 1
    dice = random.Random(0)
    for _ in range(400):
        accepted = dice.choice([0, 1, 2, 3, 4, 4, 4, 4])
        planner.saw_draft(1, 1.0)
        planner.saw_draft(1, step, forking=True)
        planner.saw_target(1, 4, 4.0)
        planner.history.saw_tests([0], [4], [accepted])
        planner.history.saw_corrections(int(accepted < 4), foreseen * (accepted < 4))
    plans = [planner.plan(1).corrections for _ in range(64)]
    assert sum(plans) == (62 if pays else 2)  # the other one is tried now and then


def texts(kind: str) -> list[tuple[bool, bool]]:
    """Of each token whether a draft of it is accepted, and whether the correction is foreseen otherwise."""
    dice, text = random.Random(0), []
    for i in range(3000):
        alpha = {"seldom": 0.4, "often": 0.7, "nearly always": 0.9, "in bursts": 0.97 if i // 12 % 2 else 0.3}[kind]
        text.append((dice.random() < alpha, dice.random() < 0.25))
    return text


def play(planner: Planner, text: list[tuple[bool, bool]], ratio: float, slowed: float = 1.0) -> float:
    """Seconds without overhead, the planner told what a session tells it. A draft step takes a second, and `slowed`
    beside the target, which is slowed down as much."""
    at = carried = 0
    seconds = 0.0
    for _ in range(2):  # a call begins with plain rounds, as what drafting gains is held against them
        planner.saw_target(1, 1, ratio, alone=True)
    while at < len(text):
        plan, left = planner.plan(1), len(text) - at - 1
        step = slowed * (1.05 if plan.corrections else 1.0)
        fresh = max(0, min(plan.window, left - carried))
        if not plan.pre_verify:
            if not carried:
                carried, seconds = fresh, seconds + fresh
                planner.saw_draft(1, 1.0, alone=True)
            fresh = 0
        tests = carried + bool(fresh)
        run = next((i for i in range(tests) if not text[at + i][0]), tests)
        foreseen = run < tests and plan.corrections > 0 and text[at + run][1]
        if plan.corrections:
            planner.history.saw_corrections(int(run < tests), int(foreseen))
        goes_on = bool(fresh) and (run == tests or foreseen)
        at += run + (run < tests or not fresh)
        verifying = ratio * (slowed if fresh else 1.0)
        seconds += max(verifying, step * (fresh if goes_on else min(fresh, 1)))
        carried = fresh - 1 if goes_on else 0
        if plan.pre_verify:
            planner.saw_draft(1, step, forking=plan.corrections > 0)
        planner.saw_target(1, tests + 1, verifying, alone=not fresh)
        planner.history.saw_tests([0], [tests], [run])
    return seconds


@pytest.mark.grid
@pytest.mark.parametrize("slowed", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("ratio", [2, 3, 5, 10, 20])
@pytest.mark.parametrize("kind", ["seldom", "often", "nearly always", "in bursts"])
def test_the_automatic_schedule_keeps_up_with_the_better_fixed_one(kind, ratio, slowed):
    """On cores that both models use, too, where each slows the other down while they run side by side."""
    text = texts(kind)
    accepted = [[float(passed) for passed, _ in text]]
    serial = min(serial_seconds(accepted, window, ratio, 1.0) for window in WINDOWS)
    overlapped = min(play(Planner(ratio, True, True, n), text, ratio, slowed) for n in (0, 1))
    assert play(Planner("auto", True, True, "auto"), text, ratio, slowed) < min(serial, overlapped) / 0.96


@pytest.mark.grid
@pytest.mark.parametrize("ratio", [1.5, 2.5, 3.5])
@pytest.mark.parametrize("kind", ["seldom", "often", "nearly always", "in bursts"])
def test_between_two_windows_the_faster_one_is_taken(kind: str, ratio: float) -> None:
    """To round the ratio would not do: a target that waits a little may gain more than it loses."""
    text = texts(kind)
    accepted = [[float(passed) for passed, _ in text]]
    serial = min(serial_seconds(accepted, window, ratio, 1.0) for window in WINDOWS)
    overlapped = min(play(Planner(window, True, True), text, ratio) for window in range(1, 7))
    assert play(Planner("auto", True, True), text, ratio) < min(serial, overlapped) / 0.97


def test_a_worker_reads_no_prompt_while_drafting_does_not_pay(monkeypatch: Any) -> None:
    """Nor does it matter to the text when it does: a draw's number does not tell of it."""
    opened: list[int] = []
    opening = Conversation.open

    def counted(self: Conversation) -> None:
        opened.append(self._setup is not None)
        opening(self)

    monkeypatch.setattr(Conversation, "open", counted)
    sides = Sides(models.llama(), [9], max_new_tokens=24, do_sample=True)
    texts = []
    for resting in (False, True):
        with PearlDrafter(models.llama(seed=3), window=3, worker="thread") as drafter:
            drafter.planners.of(sides.model).resting = resting
            torch.manual_seed(3)
            texts.append(sides.ours(drafter))
        assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0
    assert torch.equal(*texts)
    assert sum(opened) == 2


def test_a_call_too_short_to_tell_leaves_the_next_ones_worker_alone() -> None:
    sides = Sides(models.llama(), [9], max_new_tokens=2)
    with PearlDrafter(models.llama(seed=3), worker="thread") as drafter:
        sides.ours(drafter)
        assert not drafter.planners.of(sides.model).resting


@pytest.mark.parametrize(("mine", "cores", "device", "expected"), [
    (2, 2, "cpu", 1), (6, 8, "cpu", 2), (2, 16, "cpu", 2), (8, 8, "cpu", 1), (8, 8, "meta", 8),
])  # fmt: skip
def test_a_worker_computes_on_the_cores_that_the_target_leaves(
    mine: int, cores: int, device: str, expected: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: mine)
    assert threads_beside(torch.device(device)) == expected
