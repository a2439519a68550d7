"""Streams in forwards over static buffers: recorded with the target's and replayed, they draft as in eager ones."""

from typing import Any

import pytest
import torch
from captured_calls import CAPTURED, come_and_go, decode
from compare import uneven_eos
from stream_models import BATCHES, TARGETS, WAYS, join, never_paused, streams_of, target_of
from torch import Tensor
from traced import Traced, traced

import hf_specdec
from hf_specdec.drafters.streaming import StreamSteps
from hf_specdec.engine.modes import UNRECORDABLE

pytestmark = pytest.mark.real_time  # the other clocks are moved by a model's forwards, and a replay makes none


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The streams from which drafts were made, which go on though random ones are hardly ever right."""
    seen: list[Tensor] = []
    look = StreamSteps._look

    def looking(self: StreamSteps, verdict: Any) -> None:
        look(self, verdict)
        if self.ends is not None:
            seen.append(self.ends.clone())

    monkeypatch.setattr(StreamSteps, "_look", looking)
    never_paused(monkeypatch)
    join(monkeypatch)
    return seen


@pytest.mark.grid
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("way", ["by value", "with copies", "rotated"])
@pytest.mark.parametrize("name", TARGETS)
def test_streams_join_what_is_replayed(name: str, way: str, lengths: list[int], ends: list[Tensor]) -> None:
    """Their states are those of eager forwards, and the text is plain decoding's."""
    target = target_of(name)
    options, plain = {"num_nodes": 3} | WAYS[way], decode(target, None, lengths)
    assert torch.equal(decode(target, streams_of(target, **options), lengths, speculation={"forwards": "eager"}), plain)
    eager, ends[:] = list(ends), []
    drafter = streams_of(target, **options)  # which has learned nothing yet
    with traced():
        assert torch.equal(decode(target, drafter, lengths, speculation=CAPTURED), plain)
        assert Traced.played
    assert not any("dropped" in note for note in drafter.last_stats.notes)
    assert len(eager) == len(ends) > 5
    for a, b in zip(eager, ends, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_streams_go_on_in_later_calls(ends: list[Tensor]) -> None:
    """In which nothing is recorded any more, and rows leave."""
    target, lengths = target_of("Llama"), [9, 5, 1, 7]
    options = {"eos_token_id": uneven_eos(target, lengths), "speculation": CAPTURED}
    drafter = streams_of(target, num_nodes=3)
    plain = decode(target, None, lengths, eos_token_id=options["eos_token_id"])
    with traced():
        for _ in range(3):
            ends.clear()
            assert torch.equal(decode(target, drafter, lengths, **options), plain)
            assert len(ends) > 3 and not any("dropped" in note for note in drafter.last_stats.notes)


def test_streams_of_two_drafters_share_no_recording(ends: list[Tensor]) -> None:
    target = target_of("Llama")
    plain, one, other = (
        decode(target, None, [9]),
        streams_of(target, num_nodes=3),
        streams_of(target, seed=1, num_nodes=3),
    )
    decode(target, other, [9], speculation={"forwards": "eager"})
    alone, ends[:] = list(ends), []
    with traced():
        decode(target, one, [9], speculation=CAPTURED)
        ends.clear()
        assert torch.equal(decode(target, other, [9], speculation=CAPTURED), plain)
    for a, b in zip(alone, ends, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_rows_that_come_and_go() -> None:
    target = target_of("Llama")
    come_and_go(target, streams_of(target, num_nodes=3))


def test_streams_that_prune_say_that_forwards_are_not_captured() -> None:
    """Which nodes are pruned is asked in mid-forward."""
    target = target_of("Llama")
    drafter = streams_of(target, prune_below=0.02)
    ours = decode(target, drafter, [9], speculation=CAPTURED)
    assert torch.equal(ours, decode(target, None, [9]))
    assert f"forwards are not captured: {UNRECORDABLE}" in drafter.last_stats.notes


def test_streams_change_the_shape_of_forwards() -> None:
    target = target_of("Llama")
    with pytest.raises(hf_specdec.SpeculationError, match="changes their shape"):
        decode(target, streams_of(target), [9], speculation={"forwards": "bitwise"})
