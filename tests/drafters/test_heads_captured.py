"""Heads whose drafts are recorded steps: they draft what they draft without, and a round launches little.

On a CPU nothing is recorded, and steps simply run; `traced` records them as a GPU would.
"""

import weakref
from typing import Any

import models
import pytest
import torch
from compare import uneven_eos
from head_pairs import LENGTHS, PAIRS, drafting_goes_on
from heads_alone import drafts_are_those_of_texts_alone
from traced import Traced, traced

import hf_specdec
from hf_specdec import SpeculationWarning
from hf_specdec.drafters.heads import recorded
from hf_specdec.drafters.heads.recorded import Recorded
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft
from hf_specdec.target import buffers, captured
from hf_specdec.target import shelf as shelves
from hf_specdec.target.shelf import shelf_of

pytestmark = pytest.mark.real_time  # the other clocks are moved by a model's forwards, and a replay makes none
__all__ = ["drafting_goes_on"]
CAPTURED = {"forwards": "captured"}
FEW = ["GLM-4-MoE, 3", "DFlash, mixed", "EAGLE-3, SafeAILab"]
WITH_PUBLISHED = [*FEW, "published DFlash, windows, causal", "published DFlash, XPress", "EAGLE-3, P-EAGLE"]


@pytest.fixture(autouse=True)
def no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are shared with other tests; whether their buffers record is settled when these are made."""
    monkeypatch.setattr(shelves, "_shelves", weakref.WeakKeyDictionary())


def decode(pair: str, lengths: list[int], **more: Any) -> Any:
    """Text, and the drafter that was asked; without a drafter where no speculation is."""
    target, drafter = PAIRS[pair]()
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0} | more
    asked = {"assistant_model": drafter} if "speculation" in more else {}
    return target.generate(**models.prompts(lengths), **settings, **asked), drafter


def shelf(pair: str) -> list[buffers.Buffers]:
    """Buffers of the heads."""
    drafter: Any = PAIRS[pair]()[1]
    return shelf_of(getattr(drafter, "draft_model", None) or drafter.model).kept


@pytest.mark.grid
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_recorded_drafts_are_those_of_the_heads_over_each_text_alone(
    pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced():
        drafts_are_those_of_texts_alone(pair, lengths, monkeypatch, "captured")
        assert Traced.recorded > 1
    assert all(kept.free for kept in shelf(pair))


@pytest.mark.parametrize("lengths", [[9], [9, 4, 7, 2, 6]], ids=["one row", "five rows"])
@pytest.mark.parametrize("pair", FEW)
@pytest.mark.parametrize("replayed", [False, True], ids=["run", "replayed"])
def test_greedy_text_is_plain_decodings(replayed: bool, pair: str, lengths: list[int]) -> None:
    """Several rows leave at different times."""
    ends = uneven_eos(PAIRS[pair]()[0], lengths, at=(9, 15, 20)) if len(lengths) > 1 else None
    plain, _ = decode(pair, lengths, eos_token_id=ends)
    if replayed:
        with traced():
            ours, drafter = decode(pair, lengths, eos_token_id=ends, speculation=CAPTURED)
            assert Traced.played
    else:
        ours, drafter = decode(pair, lengths, eos_token_id=ends, speculation=CAPTURED)
    assert torch.equal(ours, plain)
    assert drafter.last_stats.drafted_tokens and not any("captured" in note for note in drafter.last_stats.notes)


@pytest.mark.grid
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"no_repeat_ngram_size": 2}], ids=str
)
@pytest.mark.parametrize("pair", FEW)
def test_draws_are_those_of_eager_forwards(pair: str, settings: dict[str, Any]) -> None:
    """The same seed, the same numbers. Processors that look at the text are asked token by token."""
    texts = []
    PAIRS[pair]()  # whose weights are drawn, too, when they are first asked for
    for forwards in ("eager", "captured"):
        torch.manual_seed(7)
        with traced():
            call = settings | {"do_sample": True, "speculation": {"forwards": forwards}}
            texts.append(decode(pair, [9, 4], **call)[0])
    assert torch.equal(*texts)


@pytest.mark.grid
@pytest.mark.parametrize("pair", FEW)
def test_a_text_outgrows_its_buffers(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_AHEAD", 1)
    monkeypatch.setattr(buffers, "FEWEST", 16)
    plain, _ = decode(pair, [9, 4], max_new_tokens=300)
    ours, drafter = decode(pair, [9, 4], max_new_tokens=300, speculation=CAPTURED)
    assert torch.equal(ours, plain) and not any("dropped" in note for note in drafter.last_stats.notes)
    assert {kept.slots for kept in shelf(pair)} == {256, 512}


@pytest.mark.parametrize("pair", WITH_PUBLISHED)
def test_what_came_while_nothing_was_drafted_is_read_at_once(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the widest recorded step takes."""
    monkeypatch.setattr(recorded, "WIDEST", 4)
    monkeypatch.setattr(recorded, "WIDTHS", (1, 2, 4))
    plain, _ = decode(pair, [9, 4])
    with traced():
        ours, drafter = decode(pair, [9, 4], speculation=CAPTURED)
    assert torch.equal(ours, plain) and not any("dropped" in note for note in drafter.last_stats.notes)


@pytest.mark.parametrize("pair", WITH_PUBLISHED)
def test_a_row_near_its_end_shortens_no_other(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row, which is fed what is right, gets there long before the others."""
    plain, _ = decode(pair, [9, 9, 9])
    rooms: list[list[int]] = []
    propose = TreeSession.propose

    def feeding(self: Any, sequences: Any, room: list[int]) -> Draft:
        depths, most = propose(self, sequences, room).depths(), self.steps.head.most
        assert [max(row) for row in depths] == [min(max(room), most)] * len(room)
        rooms.append(room if min(room) < most < max(room) else [])
        right = plain[0].tolist()[sequences.lengths[0] :][: min(room[0], most)] if sequences.rows[0] == 0 else []
        return Draft.from_lists([right, *[[]] * (len(room) - 1)])

    monkeypatch.setattr(TreeSession, "propose", feeding)
    ours, drafter = decode(pair, [9, 9, 9], speculation=CAPTURED)
    assert torch.equal(ours, plain) and any(rooms)
    assert not any("dropped" in note for note in drafter.last_stats.notes), drafter.last_stats.notes


@pytest.mark.grid
@pytest.mark.parametrize("pair", WITH_PUBLISHED)
def test_after_a_warm_up_nothing_is_recorded(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CHUNKS", captured.CHUNKS[:1])  # of the prompt's widths
    target, drafter = PAIRS[pair]()
    call = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "speculation": CAPTURED}
    with traced():
        hf_specdec.warm_up(target, drafter, **models.prompts([5]), **call)
        before = Traced.recorded
        decode(pair, [9], **call)
        assert Traced.recorded == before and Traced.played


@pytest.mark.parametrize("pair", FEW)
def test_without_memory_for_buffers_heads_draft_as_they_did(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Recorded, "taken_over", fails)
    plain, _ = decode(pair, [9])
    with pytest.warns(SpeculationWarning, match="no memory for static buffers"):
        ours, drafter = decode(pair, [9], speculation=CAPTURED)
    assert torch.equal(ours, plain) and drafter.last_stats.drafted_tokens > 40
