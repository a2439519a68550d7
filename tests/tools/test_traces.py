"""The budget's decisions, recorded and replayed."""

from typing import Any

import models
import pytest
import torch
from clocks import Clock
from compare import PROMPTS, Sides
from laboratory import script

from hf_specdec import HybridDrafter, PromptLookupDrafter
from hf_specdec.budget import Cost, Learned

traces = script("traces")


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "four rows"])
@pytest.mark.parametrize("kind", ["lookup", "branches", "hybrid"])
@pytest.mark.parametrize("slope", [0.01, 0.2])
def test_a_replay_decides_and_times_as_the_engine_did(
    kind: str, lengths: list[int], slope: float, monkeypatch: Any
) -> None:
    """By a clock that only the target's forwards move; the first forward of a shape does not count, so the first
    rounds know less than there is to know."""
    model, draft = models.llama(), models.llama(seed=1, num_hidden_layers=1)
    inner = {
        "lookup": PromptLookupDrafter(),
        "branches": PromptLookupDrafter(num_branches=3),
        "hybrid": HybridDrafter(draft),
    }[kind]
    tracing, sides = traces.TracingDrafter(inner), Sides(model, lengths, max_new_tokens=40)
    sides.ours()  # the probe
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + slope * width):
        for _ in range(3):
            assert torch.equal(sides.ours(tracing), sides.plain)
    assert len(tracing.rounds) > 20
    for traced in tracing.rounds:
        count, tokens, _ = traced.replayed()
        assert count == traced.verified and tokens >= len(traced.rows)
        assert traced.seconds == pytest.approx(1 + slope * (1 + traced.verified))
    late = tracing.rounds[-10:]
    assert sum(traced.replayed()[2] for traced in late) == pytest.approx(sum(t.seconds for t in late), rel=0.07)


def test_fates_are_what_the_text_says(monkeypatch: Any) -> None:
    """Of a draft model that is the target itself the first choices survive, and what hangs beside them does not. By a
    clock that forwards move alone: how much is drafted must not depend on the machine."""
    model, draft = models.llama(max_position_embeddings=256), models.llama(max_position_embeddings=256)
    tracing, sides = traces.TracingDrafter(HybridDrafter(draft)), Sides(model, [7], max_new_tokens=120)
    sides.ours()  # the probe
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + 0.01 * width), clock.moved_by(draft, lambda width: 0.2):
        for _ in range(3):
            assert torch.equal(sides.ours(tracing), sides.plain)
    accepted = sum(traced.tokens - 1 for traced in tracing.rounds)
    survived = [chance for traced in tracing.rounds for chance, right in traced.fates if right]
    wrong = [chance for traced in tracing.rounds for chance, right in traced.fates if not right]
    assert len(survived) >= accepted > 20 and len(wrong) > 20
    assert sum(survived) / len(survived) > 0.5 > sum(wrong) / len(wrong)


def test_calibration_error_is_the_mean_distance_from_what_came_true() -> None:
    fates = [(0.25, True), (0.25, False), (0.25, False), (0.25, False), (0.85, True), (0.85, False)]
    error, bins = traces.calibration_error(fates)
    assert bins == [(0.25, 0.25, 4), (0.85, 0.5, 2)]
    assert error == pytest.approx(2 * 0.35 / 6)
    assert traces.calibration_error([]) == (0.0, [])
