"""PEARL where rows may copy: the same text, the same distribution, and a draft model's own history."""

import copy
from typing import Any

import pytest
import torch
import toy_drafters as drafters
from continuations import SMALL, sampling_p_value
from models import llama, prompts

from hf_specdec import Drafter, PearlDrafter
from hf_specdec.budget import Acceptance
from hf_specdec.drafters.pearl import session
from hf_specdec.drafters.pearl.copying import Copying, as_likely_as, faster_than
from hf_specdec.drafters.pearl.history import History
from hf_specdec.drafters.pearl.schedule import Overlapped
from hf_specdec.protocol import Sequences

TARGET = llama(vocab=8)
DRAFTS = {"right": copy.deepcopy(TARGET), "wrong": llama(vocab=8, seed=5)}
SERIAL: dict[str, Any] = {"pre_verify": False, "post_verify": False}
OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def pearl(draft: str = "wrong", **options: Any) -> PearlDrafter:
    return PearlDrafter(DRAFTS[draft], **{"worker": "thread", "lookup": True, "window": 3} | options)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is carried, however unlikely and slow."""
    monkeypatch.setattr(History, "acceptance", 0.0)
    monkeypatch.setattr(session, "faster_than", lambda *_: as_likely_as(0.0))


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copied tokens of each round that asked for some."""
    counts: list[int] = []
    copy_of = Copying.copy

    def watched(self: Any, *arguments: Any) -> Any:
        copies = copy_of(self, *arguments)
        counts.append(sum(map(len, copies)))
        return copies

    monkeypatch.setattr(Copying, "copy", watched)
    return counts


@pytest.mark.grid
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
@pytest.mark.parametrize("schedule", [{}, SERIAL], ids=["overlapped", "serial"])
def test_in_lockstep_too(lengths: list[int], schedule: dict[str, Any], eager: None, carried: list[int]) -> None:
    """A processor of the user's own has to be asked place by place."""
    inputs = prompts(lengths, 8)
    options = OPTIONS | {"logits_processor": [lambda ids, scores: scores]}
    plain = TARGET.generate(**inputs, **options)
    assert torch.equal(TARGET.generate(**inputs, **options, assistant_model=pearl(**schedule)), plain)
    assert sum(carried) > 10


@pytest.mark.parametrize("schedule", [SERIAL, {"post_verify": False}], ids=["serial", "pre-verify alone"])
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "uneven rows"])
def test_copies_stand_in_for_drafts_that_would_be_waited_for(
    schedule: dict[str, Any], lengths: list[int], eager: None, carried: list[int]
) -> None:
    inputs = prompts(lengths, 8)
    plain = TARGET.generate(**inputs, **OPTIONS)
    drafter = pearl(**schedule)
    assert torch.equal(TARGET.generate(**inputs, **OPTIONS, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and sum(carried) > 10
    assert drafter.last_stats.draft_calls < pearl_calls(inputs, schedule)


def pearl_calls(inputs: Any, schedule: dict[str, Any]) -> int:
    """Draft steps without copies."""
    drafter = pearl(lookup=False, **schedule)
    TARGET.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert drafter.last_stats is not None
    return drafter.last_stats.draft_calls


def test_how_much_of_a_copy_is_worth_carrying() -> None:
    rows = [[0.9, 0.8, 0.3], [0.5], []]
    assert as_likely_as(0.5)(rows) == [2, 1, 0]
    assert as_likely_as(0.95)(rows) == [0, 0, 0]

    def seconds(width: int) -> float:
        return 1.0 + 0.2 * (width - 1)

    promised = (3 + 0.9 + 0.5 + 0.8) / seconds(3) / 3
    assert faster_than(promised - 0.01, seconds, lockstep=False)(rows) == [2, 1, 0]
    assert faster_than(promised + 0.01, seconds, lockstep=False)(rows) == [0, 0, 0]
    assert faster_than(0.9, seconds, lockstep=True)(rows) == [0, 0, 0], "one row has nothing to copy"


def test_a_finished_row_does_not_keep_the_others_from_copying() -> None:
    """Of a batch in lockstep: it stays, and has no room."""
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5]] * 2)
    mask = torch.ones_like(prompt)
    context = drafters.context(prompt_ids=prompt, prompt_mask=mask, vocab_size=97, lockstep=True, trees=True)
    copying: Any = Copying(context, Acceptance())
    text = Sequences(prompt, [7, 7], [0, 1], prompt.tolist())
    cheap = faster_than(0.1, lambda width: 1.0 + 0.01 * width, lockstep=True)
    found = copying.copy([[], []], text, [5, 0], cheap)
    assert found[0] and found[0][0] == (6, 1.0) and not found[1]


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


@pytest.mark.grid
@pytest.mark.parametrize("options", [{"corrections": 0}, {"corrections": 2}, SERIAL], ids=["none", "two", "serial"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 4.0}, {"top_k": 3}], ids=["plain", "hot", "top-k"])
def test_the_joint_distribution_is_the_targets(settings: dict[str, Any], options: dict[str, Any], eager: None) -> None:
    """3,000 rows, three tokens; seeded."""
    assert sampling_p_value(sampling(**options), settings) > 0.005


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
