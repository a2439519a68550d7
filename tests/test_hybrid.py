"""The hybrid: what it measures, what it chooses, and the engine's promises."""

from types import SimpleNamespace

import pytest
import torch
from continuations import (
    BATCHES,
    FORBIDDING,
    SETTINGS,
    SMALL,
    proposes_nothing_forbidden,
    same_greedy_text,
    sampling_p_value,
)
from models import llama, prompts

from hf_specdec import Drafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.hybrid import HybridDrafter, Meter
from hf_specdec.protocol import Sequences


def meter(draft_seconds=0.2, alpha=0.5, window=4):
    """A draft model of this speed beside a target whose forward takes a second, whatever its width."""
    known = Meter(8)
    for width in (1, 5, 9):
        known.model.observe_verify(width, 1.0)
    for _ in range(300):
        known.observe_draft(window * draft_seconds, window)
        known.model.observe_acceptance([100], [alpha / (1 - alpha)])
    return known


def test_an_unmeasured_draft_model_is_tried_first():
    assert not Meter(8).lookup_pays([8], [16], [16], False)


def test_without_a_match_there_is_nothing_to_copy():
    assert not meter(draft_seconds=100.0).lookup_pays([0, 0], [0, 0], [0, 0], False)


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_a_lookup_that_is_always_right_beats_the_draft_model_and_one_that_is_always_wrong_does_not(alpha):
    known = meter(0.01, alpha)
    for _ in range(100):
        known.observe_lookup(5, [1, 2, 3, 4], [1, 2, 3, 4, 5])
        known.observe_lookup(2, [1, 2, 3, 4], [9])
    assert known.alpha(5) > 0.95 and known.alpha(2) < 0.05
    assert known.lookup_pays([5], [10], [10], False)
    assert not known.lookup_pays([2], [4], [4], False)


def test_the_cost_of_the_draft_model_decides_between_equals():
    for draft_seconds, pays in ((0.001, False), (1.0, True)):
        known = meter(draft_seconds, alpha=0.8, window=6)
        for _ in range(100):
            known.observe_lookup(3, [1, 2, 3, 4], [1, 2, 3, 9])
        assert known.lookup_pays([3], [6], [6], False) is pays


def test_a_lookup_is_judged_by_the_text_even_when_it_was_not_drafted():
    known = Meter(4)
    before = known.alpha(2)
    known.observe_lookup(2, [1, 2, 3], [1])  # one position was told about, and it was right
    assert known.alpha(2) > before
    known.observe_lookup(2, [1, 2, 3], [])
    assert known.alpha(2) > before


def test_rows_in_lockstep_need_all_matches_to_be_good():
    known = meter(0.05, alpha=0.6)
    for _ in range(100):
        known.observe_lookup(5, [1, 2, 3, 4], [1, 2, 3, 4, 5])
        known.observe_lookup(2, [1, 2, 3, 4], [9])
    assert known.lookup_pays([5, 2], [8, 8], [8, 8], lockstep=False)
    assert not known.lookup_pays([5, 2], [8, 8], [8, 8], lockstep=True)


@pytest.mark.parametrize("seconds_per_token", [0.0, 0.1])
def test_a_tree_is_charged_for_all_its_nodes(seconds_per_token):
    known = meter(0.05, alpha=0.6)
    for width in (1, 5, 9):
        known.model.verify_seconds[width] = 1.0 + seconds_per_token * width
    for _ in range(100):
        known.observe_lookup(5, [1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert known.lookup_pays([5], [8], [8], False)
    assert known.lookup_pays([5], [8], [60], False) is (seconds_per_token == 0)


@pytest.mark.parametrize("branches", [1, 3])
def test_the_meter_is_told_the_nodes_that_would_be_verified(branches, monkeypatch):
    told = []
    monkeypatch.setattr(Meter, "lookup_pays", lambda self, matches, lengths, nodes, *more: told.append(nodes) or True)
    text = [[1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8, 1, 2], [9, 8, 7]]
    host = SimpleNamespace(
        prompt_ids=torch.zeros(2, 3),
        eos_token_ids=frozenset(),
        vocab_size=97,
        trees=True,
        do_sample=False,
        lockstep=False,
        device="cpu",
        forbids=None,
        target=None,
    )
    session = HybridDrafter(llama(seed=1), num_branches=branches).start(host)
    lengths = [len(tokens) for tokens in text]
    draft = session.propose(Sequences(torch.zeros(2, 14, dtype=torch.long), lengths, [0, 1], text), [9, 9])
    assert told == [draft.lengths] and draft.lengths[1] == 0
    assert (draft.lengths[0] > max(draft.depths()[0])) is (branches > 1)


# ---------------------------------------------------------------------- in generate


@pytest.mark.parametrize(
    "options",
    [{}, {"num_draft_tokens": 3, "num_branches": 3}, {"num_candidates": 3}],
    ids=["chain", "tree", "candidates"],
)
@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_greedy_text_is_plain_decodings(lengths, eos, options):
    stats = same_greedy_text(HybridDrafter(llama(vocab=8, seed=1), **options), lengths, eos)
    # The last round may have no room for a draft.
    assert stats.row_steps - 4 <= sum(stats.sources.values()) <= stats.row_steps


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 2, "num_branches": 3}], ids=["chain", "tree"])
@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "four rows"])
def test_neither_part_proposes_what_is_forbidden(lengths, settings, options, monkeypatch):
    turn = iter(range(10**6))
    monkeypatch.setattr(
        Meter, "lookup_pays", lambda self, matches, lengths, nodes, *more: next(turn) % 3 > 0 and any(lengths)
    )
    proposes_nothing_forbidden(HybridDrafter(llama(vocab=8, seed=1), **options), lengths, settings)


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 2, "num_branches": 3}], ids=["chain", "tree"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_sampled_text_has_the_targets_distribution(settings, options):
    drafter = HybridDrafter(llama(vocab=SMALL, seed=1), **options)
    assert sampling_p_value(drafter, settings) > 1e-3


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_sources_may_change_at_every_round(lengths, monkeypatch):
    """Whatever was chosen, the draft model finds its way back into the text."""
    turn = iter(range(10**6))
    monkeypatch.setattr(
        Meter, "lookup_pays", lambda self, matches, lengths, nodes, *more: next(turn) % 3 > 0 and any(lengths)
    )
    target = llama(vocab=8)
    drafter = HybridDrafter(target, num_draft_tokens=3)  # the target itself: all that it drafts is accepted
    inputs = prompts(lengths, 8)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
    stats = drafter.last_stats
    assert set(stats.sources) == {"draft_model", "prompt_lookup"}
    assert stats.accepted_tokens >= 2 * stats.sources["draft_model"]


@pytest.mark.parametrize("positions", [8, 24], ids=["shorter than the prompts", "ends in the text"])
@pytest.mark.parametrize("lengths", [[12], [12, 12], [9, 12, 3]], ids=["one row", "equal rows", "uneven rows"])
def test_past_the_draft_models_context_the_lookup_goes_on_alone(lengths, positions, monkeypatch, recwarn):
    monkeypatch.setattr(Meter, "lookup_pays", lambda *_: False)
    target, inputs = llama(vocab=8), prompts(lengths, 8)
    drafter = HybridDrafter(llama(vocab=8, max_position_embeddings=positions), num_draft_tokens=3)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
    stats = drafter.last_stats
    assert set(stats.sources) == {"prompt_lookup"} | ({"draft_model"} if positions > 12 else set())
    # More than the draft model's windows of three can have given: copies were accepted, too.
    assert stats.accepted_tokens > 3 * stats.sources["draft_model"]
    assert not [w for w in recwarn if issubclass(w.category, SpeculationWarning)]


def test_it_comes_back_from_its_folder(tmp_path):
    HybridDrafter(llama(seed=1), num_draft_tokens=4, max_match=5).save_pretrained(str(tmp_path))
    loaded = Drafter.from_pretrained(str(tmp_path))
    assert isinstance(loaded, HybridDrafter)
    assert (loaded.config.num_draft_tokens, loaded.config.max_match) == (4, 5)


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"max_match": 0}, {"max_draft_tokens": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        HybridDrafter(llama(), **options)
