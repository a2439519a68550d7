"""The suffix store against a plain search, its bound, its files, and the engine's promises."""

import math
import random
import threading
import tracemalloc

import numpy as np
import pytest
import torch
import toy_drafters as drafters
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

from hf_specdec import SpeculationError
from hf_specdec.drafters.sources.past import likely_branches
from hf_specdec.drafters.sources.store import GRAMS
from hf_specdec.drafters.sources.written import Written
from hf_specdec.drafters.suffix import SuffixDrafter, SuffixStore
from hf_specdec.protocol import Sequences


def tree_host():
    return drafters.context(vocab_size=1000, trees=True)


def searched(texts, suffix, max_match):
    """What followed the longest match, by trying everything: its length, and the continuations, newest first."""
    best, found = 1, []
    for text in texts:
        for place in range(2, len(text)):
            length = 0
            while length < min(max_match, place, len(suffix)) and text[place - 1 - length] == suffix[-1 - length]:
                length += 1
            if length > best:
                best, found = length, []
            if length == best and length > 1:
                found.append(text[place:])
    return (best, found[::-1]) if found else (0, [])


# ---------------------------------------------------------------------- the store


@pytest.mark.parametrize("vocab", [2, 3, 10, 50])
@pytest.mark.parametrize("max_match", [2, 5, 32])
def test_the_store_finds_what_a_full_search_finds(vocab, max_match):
    for seed in range(5):
        dice = random.Random(seed)
        store, texts = SuffixStore(1), []
        for _ in range(10):
            texts.append([dice.randrange(vocab) for _ in range(dice.randrange(30))])
            store.add(texts[-1])
            suffix = [dice.randrange(vocab) for _ in range(dice.randrange(1, 40))]
            found = store.continuations(suffix, 6, max_match, samples=1000)
            assert (found.length, found.tokens) == _cut(searched(texts, suffix, max_match), 6)


def _cut(found, length):
    return found[0], [text[:length] for text in found[1]]


def test_the_oldest_makes_room_and_what_is_left_is_found():
    store, dice = SuffixStore(1), np.random.default_rng(0)
    texts = [dice.integers(0, 1000, 3000) for _ in range(30)]
    for text in texts:
        store.add(text)
    assert len(store) == store.capacity < sum(map(len, texts))
    assert store.continuations(texts[-1][100:120].tolist(), 5).tokens == [texts[-1][120:125].tolist()]
    assert store.continuations(texts[0][100:120].tolist(), 5).length < 8


@pytest.mark.parametrize(("memory_mb", "tokens"), [(4, 600_000), pytest.param(64, 10_000_000, marks=pytest.mark.slow)])
def test_the_store_stays_within_its_bound(memory_mb, tokens):
    text = np.random.default_rng(0).zipf(1.3, 50_000) % 8_192
    tracemalloc.start()  # NumPy tells it all that it takes, also for a moment
    store = SuffixStore(memory_mb)
    for _ in range(tokens // len(text)):
        store.add(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(store) == store.capacity
    assert store.num_bytes <= peak < memory_mb << 20


def test_a_store_comes_back_from_its_file_and_a_smaller_one_keeps_the_newest(tmp_path):
    dice = np.random.default_rng(0)
    store, texts = SuffixStore(2), [dice.integers(0, 100, 5000) for _ in range(12)]
    for text in texts:
        store.add(text)
    store.save(tmp_path / "store.safetensors")
    loaded = SuffixStore.load(tmp_path / "store.safetensors", memory_mb=2)
    small = SuffixStore.load(tmp_path / "store.safetensors", memory_mb=1)
    assert len(loaded) == len(store) and len(small) == small.capacity < len(store)
    for place in range(10, 4000, 400):
        suffix = texts[-1][place - 10 : place].tolist()
        expected = store.continuations(suffix, 8)
        assert loaded.continuations(suffix, 8) == small.continuations(suffix, 8) == expected


@pytest.mark.parametrize("damage", ["truncated", "a bit", "another file", "no file", "other tensors"])
def test_a_damaged_file_is_a_clear_error(tmp_path, damage):
    from safetensors.torch import save_file

    path = tmp_path / "store.safetensors"
    store = SuffixStore(1)
    store.add(range(500))
    store.save(path)
    whole = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(whole[:-100])
    elif damage == "a bit":
        whole[-100] ^= 1
        path.write_bytes(whole)
    elif damage == "another file":
        path.write_text("{}")
    elif damage == "no file":
        path.unlink()
    else:
        save_file({"tokens": torch.zeros(3, 3)}, path)
    with pytest.raises(SpeculationError, match=r"store\.safetensors"):
        SuffixStore.load(path)


def test_negative_ids_and_sizes_are_refused():
    with pytest.raises(SpeculationError, match="negative"):
        SuffixStore(1).add([1, -1])
    with pytest.raises(SpeculationError, match="memory_mb"):
        SuffixStore(0)


def test_threads_share_a_store():
    store = SuffixStore(1)
    wrong = []

    def work(seed):
        dice = np.random.default_rng(seed)
        for _ in range(150):
            text = dice.integers(1000 * seed, 1000 * seed + 1000, 400)
            store.add(text)
            found = store.continuations(text[50:70].tolist(), 5)
            if found.length < 20 or found.tokens[0] != text[70:75].tolist():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def matches_in_others(texts, row, length, max_match):
    """By a full search: what follows each match of a row's end in other rows, by how long the match is."""
    suffix, found = texts[row][-max_match:], {}
    for text in (text for other, text in texts.items() if other != row):
        for end in range(1, len(text)):
            agree = [a == b for a, b in zip(reversed(text[:end]), reversed(suffix), strict=False)]
            match = agree.index(False) if False in agree else len(agree)
            found.setdefault(match, []).append(text[end : end + length])
    return {match: texts for match, texts in found.items() if match >= GRAMS[-1]}


@pytest.mark.parametrize("vocab", [2, 5, 30])
def test_rows_find_what_others_have_written_so_far(vocab):
    """The last place of each row is looked at: seldom is an earlier one a longer match."""
    dice, written, longest = np.random.default_rng(vocab), Written(), []
    for step in range(120):
        row = int(dice.integers(0, 4))
        if step % 40 == 39 and row in written.texts:
            written.end(row)
        written.extend(row, dice.integers(0, vocab, dice.integers(1, 5)).tolist())
        there, found = matches_in_others(written.texts, row, 3, 10), written.continuations(row, 3, 10)
        assert all(tokens in there[found.length] for tokens in found.tokens)
        if there:
            longest.append(found.length == max(there))
    assert sum(longest) > len(longest) / 2 > 0
    for row in list(written.texts):
        written.end(row)
    assert not written.texts and not written._ends


# ---------------------------------------------------------------------- likely continuations


def test_the_likeliest_branches_grow_first():
    texts = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    assert likely_branches(texts, 9, 9, 1, 0.0) == [[1, 2, 3]]
    assert likely_branches(texts, 9, 9, 1, 0.5) == [[1, 2]]
    assert likely_branches(texts, 9, 2, 1, 0.0) == [[1, 2]]
    assert sorted(likely_branches(texts, 9, 9, 4, 0.0)) == [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    assert likely_branches([], 9, 9, 4, 0.0) == likely_branches([[]], 9, 9, 4, 0.0) == []


@pytest.mark.parametrize("nodes", [4, 5, 7])
def test_of_equally_likely_texts_the_newest_is_copied_to_its_end_first(nodes):
    newest, older = [1, 2, 3, 4], [5, 6, 7, 8]
    found = likely_branches([newest, older], nodes, 4, 2, 0.0)
    assert found[0] == newest[: nodes - 1] and sum(map(len, found)) == nodes
    assert all(branch in (newest[: len(branch)], older[: len(branch)]) for branch in found)


@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("length", [2, 5, 16])
def test_a_tree_has_a_chains_depth_and_room_for_its_branches(branches, length):
    drafter = SuffixDrafter(max_draft_tokens=length, num_branches=branches, memory_mb=1)
    for first in range(10, 14):
        drafter.store.add([1, 2, 3, 4, 5, 6, 7, 8, first, *range(20 * first, 20 * first + 20)])
    host = tree_host()
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    draft = drafter.start(host).propose(Sequences(torch.tensor([text]), [8], [0], [text]), [99])
    depths = draft.depths()[0][: draft.lengths[0]]
    assert depths.count(1) == branches and max(depths) == length
    assert draft.lengths[0] == sum(math.ceil(length / i) for i in range(1, branches + 1))


@pytest.mark.parametrize("min_probability", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("branches", [1, 2, 6, 8])
def test_the_rows_own_continuations_are_drafted_however_many_there_are(branches, min_probability):
    end, text = [8, 7, 6, 5, 4, 3, 2, 1], []
    for k in range(1, 9):  # the last k tokens go on with 10 + k, the more often the fewer they are
        text += [0, *end[-k:], 10 + k] * (9 - k)
    text += end
    drafter = SuffixDrafter(num_branches=branches, min_probability=min_probability, memory_mb=1)
    host = tree_host()
    draft = drafter.start(host).propose(Sequences(torch.tensor([text]), [len(text)], [0], [text]), [99])
    assert draft.depths()[0][: draft.lengths[0]].count(1) == branches


@pytest.mark.parametrize("nodes", [1, 2, 5, 20])
@pytest.mark.parametrize("branches", [1, 2, 5])
def test_a_tree_keeps_its_bounds(nodes, branches):
    dice = random.Random(0)
    texts = [[dice.randrange(3) for _ in range(dice.randrange(9))] for _ in range(30)]
    found = likely_branches(texts, nodes, 6, branches, 0.0)
    prefixes = {tuple(branch[: i + 1]) for branch in found for i in range(len(branch))}
    assert len(prefixes) <= nodes and max(map(len, found)) <= 6
    for prefix in prefixes:
        assert sum(other[:-1] == prefix[:-1] for other in prefixes if len(other) == len(prefix)) <= branches
        assert any(tuple(text[: len(prefix)]) == prefix for text in texts)


# ---------------------------------------------------------------------- in generate


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.usefixtures("width_costs_nothing")
def test_greedy_text_is_plain_decodings_and_is_remembered(lengths, eos, branches):
    drafter = SuffixDrafter(num_branches=branches, memory_mb=1)
    again = same_greedy_text(drafter, lengths, eos, vocab=40)
    assert len(drafter.store) > 0
    if eos is None:  # the second call saw this text before
        assert again.mean_acceptance_length > 5


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "four rows"])
def test_nothing_forbidden_is_proposed(lengths, settings, branches):
    drafter = SuffixDrafter(num_branches=branches, memory_mb=1)
    dice = np.random.default_rng(0)
    for _ in range(20):
        drafter.store.add(dice.integers(0, 8, 30))
    proposes_nothing_forbidden(drafter, lengths, settings)


@pytest.mark.grid
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_has_the_targets_distribution(settings, branches):
    drafter = SuffixDrafter(num_branches=branches, memory_mb=1)
    dice = np.random.default_rng(0)
    for _ in range(20):
        drafter.store.add([4, 5, 2, 3, *dice.integers(0, SMALL, 8)])
    assert sampling_p_value(drafter, settings) > 1e-3


def test_outputs_are_kept_and_prompts_only_as_far_as_matches_reach():
    target, inputs = llama(vocab=40), prompts([30], 40)
    drafter = SuffixDrafter(max_match=4, memory_mb=1)
    out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=20, do_sample=False, eos_token_id=None)[0]
    assert len(drafter.store) <= 5 + 20 + 1
    assert drafter.store.continuations(out[36:44].tolist(), 3).tokens == [out[44:47].tolist()]
    assert drafter.store.continuations(out[5:13].tolist(), 3).length < 8


class Listed(SuffixStore):
    """Keeps each text that is added."""

    def __init__(self):
        super().__init__(1)
        self.texts = []

    def add(self, tokens):
        super().add(tokens)
        self.texts.append(list(tokens))


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("room", [3, 4, 5, 16])  # often the last round has no room for a draft
@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("branches", [1, 3])
def test_the_store_is_given_exactly_the_output_after_its_prompts_tail(lengths, eos, room, branches):
    target, inputs = llama(vocab=8), prompts(lengths, 8)
    drafter = SuffixDrafter(store=Listed(), max_match=4, num_branches=branches)
    options = {"max_new_tokens": room, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    out = target.generate(**inputs, **options, assistant_model=drafter)
    wanted = []
    for text, length in zip(out.tolist(), lengths, strict=True):
        prompt, new = text[max(lengths) - length : max(lengths)], text[max(lengths) :]
        new = new[: new.index(eos) + 1] if eos in new else new
        if len(new) > 1:  # of a row that ends with the prefill no drafter is told
            wanted.append([*prompt[-3:], *new])  # a match before the first draft: its four tokens end with new[0]
    assert sorted(drafter.store.texts) == sorted(wanted)


def test_two_threads_may_generate_with_one_drafter():
    target, drafter = llama(vocab=40), SuffixDrafter(memory_mb=1)
    inputs = [prompts([9], 40, seed=seed) for seed in range(2)]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = [target.generate(**x, **options) for x in inputs]
    same = [False] * 2

    def work(i):
        for _ in range(3):
            same[i] = torch.equal(target.generate(**inputs[i], **options, assistant_model=drafter), plain[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True, True]


@pytest.mark.parametrize("options", [{"max_match": 1}, {"min_probability": 1.5}, {"memory_mb": 0}, {"num_branches": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        SuffixDrafter(**options)
