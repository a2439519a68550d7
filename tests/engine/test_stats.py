"""What a call says of itself: its gain, estimated from its own forwards, what would make it faster, why it stopped."""

import json
from collections import Counter
from typing import Any

import models
import pytest
import torch
from clocks import Clock
from close_drafts import nearly
from compare import PROMPTS, Sides, uneven_eos
from toy_drafters import Future, Toy, adversary

from hf_specdec import DraftModelDrafter, SpeculationStats, theory
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.engine.guard import MOST_NOTES, take_over
from hf_specdec.errors import LONGEST_VALUE
from hf_specdec.protocol import Draft


def stats(widths: dict[int, int], verify: Any, alpha: float = 0.8, draft: float = 0.1, **more: Any) -> SpeculationStats:
    """A run whose verifications took `verify(width)` and whose draft steps took `draft` seconds."""
    drafted = sum((width - 1) * n for width, n in widths.items())
    seconds = {width: n * verify(width) for width, n in widths.items()}
    figures = {
        "target_calls": 1 + sum(widths.values()),
        "row_steps": sum(widths.values()),
        "verify_widths": Counter(widths),
        "seconds_by_width": seconds,
        "verify_seconds": sum(seconds.values()),
        "draft_seconds": drafted * draft,
        "total_seconds": sum(seconds.values()) + drafted * draft,
        "acceptance_sum": 1000 * alpha,
        "acceptance_count": 1000,
        "mode": "lockstep",
    }
    return SpeculationStats(**figures | more)


def growing(width: int) -> float:
    return 1.0 + 0.1 * width


# ------------------------------------------------------------------ T(1) and the gain


def test_the_time_of_a_single_token_is_measured_or_lies_on_the_line() -> None:
    assert stats({6: 10, 1: 2}, growing).plain_step_seconds == pytest.approx(1.1)
    assert stats({6: 10, 4: 3}, growing).plain_step_seconds == pytest.approx(1.1)
    assert stats({6: 10}, growing).plain_step_seconds == pytest.approx(1.6)
    steep = stats({6: 10, 3: 1}, lambda width: width**2 / 9)
    assert steep.plain_step_seconds == pytest.approx(1 / 3)  # no less than the narrowest one's time per token
    assert SpeculationStats(mode="plain", target_calls=9, total_seconds=1.0).plain_step_seconds is None


def test_a_line_weighs_each_width_by_how_often_it_was_measured() -> None:
    line = theory.line_through({2: 1.0, 4: 3.0, 5: 2.0}, {2: 1000, 4: 1, 5: 1000})
    assert [line(2), line(5)] == pytest.approx([1.0, 2.0], abs=0.01)
    assert theory.line_through({2: 3.0, 4: 1.0})(1) == 2.0  # it never falls
    with pytest.raises(ValueError, match="at least one width"):
        theory.line_through({})


def test_the_gain_is_plain_decodings_time_over_the_calls() -> None:
    run = stats({6: 10, 1: 1}, growing, prefill_seconds=2.0, total_seconds=22.0, plain_steps=30)
    assert run.estimated_gain == pytest.approx((2.0 + 30 * 1.1) / 22.0)
    assert not run.gain_is_bound and str(run).startswith("1.6x estimated: ")
    bound = stats({6: 10}, growing, total_seconds=20.0, plain_steps=20)
    assert bound.gain_is_bound and str(bound).startswith("at most 1.6x estimated: ")
    assert SpeculationStats().estimated_gain is None


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_the_gain_is_the_one_that_is_measured(lengths: list[int], slope: float, monkeypatch: Any) -> None:
    """Over one row and several, whether a wider forward costs more or not."""
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    sides, drafter = Sides(model, lengths), DraftModelDrafter(draft, num_draft_tokens=3)
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + slope * width), clock.moved_by(draft, lambda width: 0.2):
        models.probed(model, draft)
        clock.now = 0.0
        assert torch.equal(sides.run(), sides.plain)
        plain, clock.now = clock.now, 0.0
        assert torch.equal(sides.ours(drafter), sides.plain)
    run = drafter.last_stats
    assert run is not None
    assert run.total_seconds == pytest.approx(clock.now)
    assert run.estimated_gain == pytest.approx(plain / clock.now)
    assert run.tokens_per_second == pytest.approx(run.emitted_tokens / clock.now)


@pytest.mark.parametrize("at", [(4, 9), (2, 3, 5, 7)])
def test_plain_steps_are_those_of_the_longest_row(at: tuple[int, ...]) -> None:
    model = models.llama()
    for lengths in ([7], PROMPTS):
        sides = Sides(model, lengths, eos_token_id=uneven_eos(model, PROMPTS, at=at))
        assert torch.equal(sides.ours(), sides.plain)
        assert sides.stats.plain_steps == sides.plain.shape[1] - sides.prompts["input_ids"].shape[1] - 1


def test_runs_add_up_and_are_plain_json() -> None:
    a = stats({6: 10}, growing, notes=["x"], window=5, plain_steps=20, emitted_tokens=21)
    b = stats({6: 2, 3: 4}, growing, notes=["x", "y"], window=5, mode="ragged", plain_steps=9, emitted_tokens=10)
    both = sum([a, b])
    assert both.seconds_by_width == {3: pytest.approx(4 * 1.3), 6: pytest.approx(12 * 1.6)}
    assert both.notes == ["x", "y"] and both.mode == "lockstep+ragged" and both.window == 5
    assert both.plain_step_seconds == pytest.approx(1.1) and both.plain_steps == 29
    assert (a + stats({2: 1}, growing, window=3)).window == 0
    told = json.loads(json.dumps(both.to_dict()))
    assert told["seconds_by_width"] == {"3": pytest.approx(5.2), "6": pytest.approx(19.2)}
    assert told["estimated_gain"] == both.estimated_gain and told["tokens_per_second"] == both.tokens_per_second
    both.to_dict()["notes"].append("z")
    assert both.notes == ["x", "y"]


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
@pytest.mark.parametrize("do_sample", [False, True])
def test_counts_add_up(lengths: list[int], do_sample: bool) -> None:
    """A row step keeps what it accepts and a token of the target's own, but for one that ends at a drafted token."""
    model = models.llama()
    drafter = DraftModelDrafter(nearly(model), num_draft_tokens=3)
    torch.manual_seed(0)
    model.generate(
        **models.prompts(lengths), max_new_tokens=30, do_sample=do_sample, pad_token_id=0, assistant_model=drafter
    )
    run, rows = drafter.last_stats, len(lengths)
    drafted, accepted = run.drafted_per_position, run.accepted_per_position
    assert run.accepted_tokens and 0 <= rows + run.row_steps + run.accepted_tokens - run.emitted_tokens <= rows
    assert all(accepted[i] <= drafted[i] <= drafted[i - 1] and accepted[i] <= accepted[i - 1] for i in range(1, 3))
    assert accepted[0] <= drafted[0] <= run.row_steps and max(drafted) < 3
    assert run.acceptance_per_position == [accepted[i] / drafted[i] for i in range(3)]
    assert run.draft_acceptance_rate == accepted.total() / drafted.total()
    assert run.mean_acceptance_length == 1 + accepted.total() / run.row_steps


# ------------------------------------------------------------------ advice


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("window", [1, 5, 12])
def test_the_advice_is_the_best_window_by_measured_times(alpha: float, window: int) -> None:
    run = stats({window + 1: 20, 1: 2}, growing, alpha, window=window)
    best = theory.best_window(alpha, growing, 0.1, 16)
    speeds = [theory.tokens_per_second(alpha, gamma, growing, 0.1) for gamma in (best, window)]
    assert run.better_window == (best if speeds[0] > 1.05 * speeds[1] else None)
    assert (f"try num_draft_tokens={best}" in str(run)) == (run.better_window is not None)


def test_there_is_advice_only_where_there_is_something_to_go_by() -> None:
    wrong: dict[str, Any] = {"widths": {11: 20, 1: 1}, "verify": growing, "alpha": 0.3, "window": 10}
    assert stats(**wrong).better_window == theory.best_window(0.3, growing, 0.1, 16) < 5
    assert stats(**wrong | {"window": 0}).better_window is None  # nobody set it
    assert stats(**wrong | {"widths": {11: 4, 1: 1}}).better_window is None  # too few rounds
    assert stats(**wrong, sources=Counter(draft_model=9)).better_window is None
    assert stats(**wrong, row_steps=84).better_window is None  # rows in lockstep
    assert stats(**wrong, row_steps=84, mode="ragged").better_window is not None
    short = {"verify": growing, "alpha": 0.95, "draft": 0.01, "window": 1}
    assert stats({2: 20, 1: 1}, **short).better_window > 5
    assert stats({2: 20}, **short).better_window is None  # nobody knows what a wider verification costs
    useless = stats({6: 20, 1: 1}, growing, alpha=0.01, draft=1.0, window=5)
    assert useless.better_window == 0 and "drafting costs more than it gains here" in str(useless)


def test_a_call_is_told_the_window_that_was_set() -> None:
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    sides = Sides(model, [7])
    for drafter, window in ((DraftModelDrafter(draft, num_draft_tokens=4), 4), (DraftModelDrafter(draft), 0)):
        sides.ours(drafter)
        assert drafter.last_stats is not None and drafter.last_stats.window == window


# ------------------------------------------------------------------ notes


@pytest.mark.eager  # a paced forward is not captured, which would be another note
@pytest.mark.parametrize("drafter_class", [DraftModelDrafter, HybridDrafter])
def test_why_drafting_was_stopped(drafter_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is as slow as the target, and mostly wrong."""
    model, draft = models.llama(), models.llama(seed=5)
    drafter, sides = drafter_class(draft), Sides(model, [7], max_new_tokens=40)
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1.0), clock.moved_by(draft, lambda width: 1.0):
        assert torch.equal(sides.ours(drafter), sides.plain)
    (note,) = drafter.last_stats.notes
    assert (
        note.startswith("the draft model was not used in ") and "because it would have cost more than it gained" in note
    )
    assert "of a target step, and the expected acceptance rate is" in note
    assert str(drafter.last_stats).splitlines()[1] == note


def test_why_drafts_for_a_target_with_a_state_were_left_out() -> None:
    model = models.build("Qwen3-Next")
    sides = Sides(model, [7], max_new_tokens=40)
    sides.ours(wrong := adversary(Future(sides.plain), 5, models.VOCAB))
    assert wrong.last_stats is not None and "keeps a recurrent state" in wrong.last_stats.notes[0]
    assert "rounds, as it did not pay" in str(wrong.last_stats)


def test_a_draft_that_pays_is_not_explained() -> None:
    sides = Sides(models.llama(), [7])
    sides.ours(sides.drafter)
    assert sides.stats.notes == [] and str(sides.stats).splitlines()[1] == ""


def test_a_drafter_that_was_dropped_and_a_call_that_ran_plainly_say_why() -> None:
    def broken(*_: Any) -> Draft:
        raise ValueError("planted")

    sides = Sides(models.llama(), [7])
    with pytest.warns(UserWarning, match="planted"):
        sides.ours(toy := Toy(broken))
    run = toy.last_stats
    assert run is not None
    (note,) = run.notes
    assert "Toy was dropped" in note and "planted" in note
    assert run.estimated_gain is not None and "nothing was drafted" in str(run)

    drafter = DraftModelDrafter(models.llama(num_hidden_layers=1))
    with pytest.warns(UserWarning, match="plain decoding"):
        sides.run(use_cache=False, assistant_model=drafter)
    run = drafter.last_stats
    assert run is not None and "this call uses no cache" in run.notes[0] and run.estimated_gain is None
    assert "decoded plainly" in str(run).splitlines()[0] and "this call uses no cache" in str(run).splitlines()[1]


def test_what_a_session_writes_into_its_statistics_does_no_harm() -> None:
    told, run = SpeculationStats(), SpeculationStats(notes=["mine"])
    told.notes, told.draft_calls, told.window = ["x" * 10**6, 3, *"abcdefghijkl"], "many", -1  # type: ignore[assignment,list-item]
    take_over(told, run)
    assert (run.draft_calls, run.window) == (0, 0) and run.notes[0] == "mine"
    assert len(run.notes) <= 1 + MOST_NOTES and max(map(len, run.notes)) <= LONGEST_VALUE + 4
    told.notes = None  # type: ignore[assignment]
    take_over(told, run)
    del told.notes
    take_over(told, run)


def test_rejections_are_counted_row_by_row() -> None:
    """One row's short draft is always right, the other's long one always wrong."""
    model, prompts = models.llama(), models.prompts([9, 9])
    call = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    future = Future(model.generate(**prompts, **call))

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        rows = zip(sequences.rows, future(sequences, room, 3), strict=True)
        return Draft.from_lists(
            [said[:1] if row == 0 else [(x + 1) % models.VOCAB for x in said] for row, said in rows]
        )

    drafter = Toy(propose)
    model.generate(**prompts, **call, assistant_model=drafter)
    stats = drafter.last_stats
    longest = stats.drafted_per_position[1]  # row steps of the second row, but for one that had room for one token
    assert longest <= stats.rejections <= longest + 1 and stats.accepted_tokens
    assert stats.alpha == stats.accepted_tokens / (stats.accepted_tokens + stats.rejections)
