"""PEARL where rows may copy: the same text, the same distribution, and a draft model's own history."""

import copy
from typing import Any

import pytest
import torch
from continuations import SMALL, sampling_p_value
from models import llama, prompts

from hf_specdec import Drafter, PearlDrafter
from hf_specdec.drafters.pearl.copying import Copying
from hf_specdec.drafters.pearl.history import History
from hf_specdec.drafters.pearl.schedule import Overlapped

TARGET = llama(vocab=8)
DRAFTS = {"right": copy.deepcopy(TARGET), "wrong": llama(vocab=8, seed=5)}
OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def pearl(draft: str = "wrong", **options: Any) -> PearlDrafter:
    return PearlDrafter(DRAFTS[draft], **{"worker": "thread", "lookup": True, "window": 3} | options)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is carried, however unlikely."""
    monkeypatch.setattr(History, "acceptance", 0.0)


@pytest.mark.parametrize("window", [1, 3, "auto"])
@pytest.mark.parametrize("lengths", [[9], [9, 9, 9], [3, 14, 1, 9]], ids=["one row", "equal rows", "uneven rows"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("corrections", [0, 2])
def test_greedy_text_is_plain_decodings(
    draft: str, lengths: list[int], window: Any, corrections: int, eager: None
) -> None:
    inputs = prompts(lengths, 8)
    plain = TARGET.generate(**inputs, **OPTIONS)
    drafter = pearl(draft, window=window, corrections=corrections)
    for _ in range(2):
        assert torch.equal(TARGET.generate(**inputs, **OPTIONS, assistant_model=drafter), plain)


@pytest.mark.parametrize("lengths", [[9], [9, 9, 9]], ids=["one row", "equal rows"])
def test_in_lockstep_too(lengths: list[int], eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of the user's own has to be asked place by place."""
    carried: list[int] = []
    copy_of = Copying.copy

    def watched(self: Any, *arguments: Any) -> Any:
        copies = copy_of(self, *arguments)
        carried.append(sum(map(len, copies)))
        return copies

    monkeypatch.setattr(Copying, "copy", watched)
    inputs = prompts(lengths, 8)
    options = OPTIONS | {"logits_processor": [lambda ids, scores: scores]}
    plain = TARGET.generate(**inputs, **options)
    assert torch.equal(TARGET.generate(**inputs, **options, assistant_model=pearl()), plain)
    assert sum(carried) > 10


def test_without_drafting_ahead_nothing_is_copied(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would draft behind it, and a short copy would stand in for a whole draft."""
    monkeypatch.setattr(Copying, "copy", lambda *arguments: pytest.fail("asked for copies"))
    inputs = prompts([9], 8)
    plain = TARGET.generate(**inputs, **OPTIONS)
    for options in ({"post_verify": False}, {"post_verify": False, "pre_verify": False}):
        assert torch.equal(TARGET.generate(**inputs, **OPTIONS, assistant_model=pearl(**options)), plain)


def test_copies_are_carried_where_the_draft_model_has_nothing_to_offer() -> None:
    inputs, accepted, asked = prompts([9], 8), {}, {}
    for lookup in (False, True):
        drafter = pearl(lookup=lookup)
        for _ in range(3):
            TARGET.generate(**inputs, **OPTIONS, assistant_model=drafter)
        assert drafter.last_stats is not None
        accepted[lookup], asked[lookup] = drafter.last_stats.accepted_tokens, drafter.last_stats.target_calls
    assert accepted[True] > accepted[False] + 10 and asked[True] < asked[False] - 10


def test_what_is_copied_says_nothing_of_the_draft_model() -> None:
    """Its window and its schedule are chosen by what it drafts."""
    shares = {}
    for lookup in (False, True):
        drafter = pearl(lookup=lookup)
        for _ in range(4):
            TARGET.generate(**prompts([9], 8), **OPTIONS, assistant_model=drafter)
        history = drafter.planners.of(TARGET).history
        shares[lookup] = history.acceptance, history.foreseen
    assert shares[True][0] < 0.5
    assert all(abs(a - b) < 0.2 for a, b in zip(*shares.values(), strict=True))


def sampling(**options: Any) -> PearlDrafter:
    return PearlDrafter(llama(vocab=SMALL, seed=7), **{"worker": "thread", "lookup": True, "window": 2} | options)


@pytest.mark.parametrize("corrections", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"temperature": 4.0}, {"top_k": 3}], ids=["plain", "hot", "top-k"])
def test_the_joint_distribution_is_the_targets(settings: dict[str, Any], corrections: int, eager: None) -> None:
    """3,000 rows, three tokens; seeded."""
    assert sampling_p_value(sampling(corrections=corrections), settings) > 0.005


def test_a_rejected_copy_that_may_be_drawn_again_is_caught(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    """The power of the test above: a correction that leaves the rejected token its chance."""
    correct = Overlapped._correct

    def planted(self: Any, p: Any, b: int, node: int) -> Any:
        return p if node < self.copied[b] else correct(self, p, b, node)

    monkeypatch.setattr(Overlapped, "_correct", planted)
    assert sampling_p_value(sampling(), {"temperature": 4.0}) < 1e-6


def test_the_option_is_stored(tmp_path: Any) -> None:
    pearl().save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path, worker="thread")
    assert isinstance(loaded, PearlDrafter) and loaded.config.lookup
