"""Prompt lookup: the index against a plain search, the cuts, and the engine's promises."""

import random

import pytest
import torch
from continuations import BATCHES, FORBIDDING, SETTINGS, proposes_nothing_forbidden, same_greedy_text, sampling_p_value
from models import llama
from toy_drafters import context
from transformers.generation import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from hf_specdec import SpeculationError
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.sources.copies import cut
from hf_specdec.drafters.sources.index import LookupIndex
from hf_specdec.protocol import Sequences
from hf_specdec.verify.processing import Processing, bans


def synthetic_text(length: int, seed: int = 0, vocab: int = 8_192) -> list[int]:
    """Phrases of 4 to 30 tokens, some heard before: text with matches of every length."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        phrase = rng.randint(4, 30)
        if len(tokens) > 100 and rng.random() < 0.5:
            start = rng.randrange(len(tokens) - phrase)
            tokens += tokens[start : start + phrase]
        else:
            tokens += [int(vocab ** rng.random()) - 1 for _ in range(phrase)]  # few tokens are frequent
    return tokens[:length]


def searched(tokens, max_match):
    """The longest match by trying everything: length, and the next tokens, most frequent then latest first."""
    for length in range(min(max_match, len(tokens) - 1), 0, -1):
        places = [i for i in range(length, len(tokens)) if tokens[i - length : i] == tokens[-length:]]
        if places:
            counts = {i: sum(tokens[i] == tokens[j] for j in places) for i in places}
            places.sort(key=lambda i: (counts[i], i), reverse=True)
            return length, list(dict.fromkeys(tokens[i] for i in places)), places[0]
    return 0, [], None


def sequences(*rows):
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    return Sequences(ids, [len(row) for row in rows], list(range(len(rows))), [list(row) for row in rows])


# ---------------------------------------------------------------------- the index


@pytest.mark.parametrize("vocab", [1, 2, 3, 10])
@pytest.mark.parametrize("max_match", [1, 2, 5, 16])
def test_the_index_finds_what_a_full_search_finds(vocab, max_match):
    for seed in range(8):
        dice = random.Random(seed)
        index = LookupIndex(max_match)
        for _ in range(70):
            index.append(dice.randrange(vocab))
            length, nexts, place = searched(index.tokens, max_match)
            match = index.longest_match()
            assert (match.length, match.positions) == (length, [] if place is None else [place])
            both = index.longest_match(min_match=length or 1, branches=2)
            assert [index.tokens[i] for i in both.positions] == nexts[:2]


@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("max_match", [1, 3, 8])
def test_a_long_match_is_as_long_as_the_texts_agree(max_match, drafted):
    """Behind drafted tokens too; never longer than was asked for, nor than the text before the place."""
    for seed in range(20):
        dice = random.Random(seed)
        text = [dice.randrange(3) for _ in range(30)]
        text += [*text[-12:], *text[5:17]]  # long repeats
        index = LookupIndex(max_match)
        index.extend(text[: len(text) - drafted])
        behind = text[len(text) - drafted :]
        match = index.longest_match(drafted=behind)
        place = match.positions[0]
        for most in (1, max_match, 9, 64):
            agreed = match.length
            if agreed == max_match:
                longest = range(agreed, max(agreed, min(most, place)) + 1)
                agreed = max(n for n in longest if text[place - n : place] == text[len(text) - n :])
            assert index.agreed(match, most, behind) == agreed


def test_more_branches_come_from_shorter_suffixes():
    index = LookupIndex(8)
    index.extend([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3])
    match = index.longest_match(branches=5)
    assert match.length == 3
    assert [index.tokens[i] for i in match.positions] == [9, 8, 7]
    assert len(index.longest_match(min_match=2, branches=5).positions) == 2


def test_a_copy_that_reaches_the_end_goes_round_the_loop():
    index = LookupIndex(8)
    index.extend([5, 6, 7, 5, 6, 7, 5])
    assert index.copy_from(index.longest_match().positions[0], 7) == [6, 7, 5, 6, 7, 5, 6]


def test_the_work_per_token_does_not_grow_with_the_context():
    """Counted in steps of the interpreter, which a busy machine cannot disturb."""
    import sys

    steps = 0

    def count(*_):
        nonlocal steps
        steps += 1
        return count

    totals = []
    for length in (1_000, 40_000):
        text = synthetic_text(length + 600)
        index = LookupIndex(8)
        index.extend(text[:length])
        steps = 0
        sys.settrace(count)
        try:
            for token in text[length:]:
                index.append(token)
                index.longest_match()
        finally:
            sys.settrace(None)
        totals.append(steps)
    assert totals[1] < 2 * totals[0]


# ---------------------------------------------------------------------- from matches to drafts


def test_drafts_end_at_an_eos_and_before_ids_the_target_lacks():
    host = context(eos_token_ids=frozenset({7}), vocab_size=50)
    rows = [[[1, 2, 7, 3], [1, 50, 3], [-1]], [], [[-1, 4]]]
    assert cut(rows, sequences([1], [2], [3]), host) == [[[1, 2, 7], [1]], [], []]


def test_every_branch_ends_before_its_first_forbidden_token():
    """What is forbidden depends on the text before it, the branch's own tokens and padding columns included."""
    asked = []

    def forbids(ids, rows, lengths, tokens):
        texts = [ids[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
        asked.extend(texts)
        return [token == sum(text) for text, token in zip(texts, tokens, strict=True)]

    ids = torch.tensor([[0, 1, 2], [0, 0, 5]])
    texts = Sequences(ids, [3, 3], [0, 1], [[1, 2], [5]])
    rows = [[[4, 1, 8], [3, 9], [4, 7, 1]], [[6, 11]]]
    assert cut(rows, texts, context(forbids=forbids)) == [[[4, 1], [4]], [[6]]]
    assert asked[:3] == [[0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 4, 1]] and asked[-1] == [0, 0, 5, 6]
    assert ids.tolist() == [[0, 1, 2], [0, 0, 5]]


@pytest.mark.parametrize("trees", [True, False])
def test_copies_come_with_their_chances_the_likeliest_first(trees):
    drafter = PromptLookupDrafter(num_branches=3)
    session = drafter.start(context(trees=trees))
    draft = session.propose(sequences([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], [5]), [9, 9])
    assert draft.lengths[1] == 0 and list(draft.survival[1]) == []
    chances = draft.survival[0]
    assert len(chances) == draft.lengths[0] > 3 and sorted(chances, reverse=True) == list(chances)
    assert (draft.parents is not None) is trees
    first = draft.tokens[0, 0].item()
    assert first == 9 and ({8, 7} < set(draft.tokens[0].tolist()) or not trees)


@pytest.mark.parametrize("branches", [1, 2])
def test_a_long_copy_is_as_long_as_it_may_be(branches):
    text = [*range(10, 98)] * 3
    drafter = PromptLookupDrafter(max_draft_tokens=200, tokens_per_match=100, num_branches=branches)
    draft = drafter.start(context(trees=branches > 1)).propose(sequences(text), [500])
    assert draft.lengths == [200] == [len(draft.survival[0])]


class Own(LogitsProcessor):
    """A user's: it may not be called once more than plain decoding calls it."""

    def __call__(self, input_ids, scores):
        raise AssertionError("asked")


@pytest.mark.parametrize(
    "processors, proposed",
    [
        ([SuppressTokensLogitsProcessor([1])], [3]),
        ([Own(), NoBadWordsLogitsProcessor([[9], [3, 1, 2]])], [3, 1]),
        ([NoRepeatNGramLogitsProcessor(3), TopKLogitsWarper(1)], []),
        ([MinLengthLogitsProcessor(7, 1)], [3]),
        ([MinLengthLogitsProcessor(6, 1)], [3, 1, 2, 3]),
        ([SequenceBiasLogitsProcessor([[[3], -100.0]]), TopKLogitsWarper(1), Own()], [3, 1, 2, 3]),
    ],
)
def test_a_copy_ends_before_what_the_processors_forbid(processors, proposed):
    """Bad words here end at the token before the forbidden one; a low score or a rank forbids nothing."""
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    rows = Sequences(ids, [5], [0], ids.tolist())
    known = context(forbids=bans(Processing(processors), 10))
    draft = PromptLookupDrafter(tokens_per_match=2).start(known).propose(rows, [9])
    assert draft.tokens[0, : draft.lengths[0]].tolist() == proposed


@pytest.mark.parametrize("room", [0, 1, 3, 50])
def test_a_short_match_drafts_little_and_the_budget_is_kept(room):
    session = PromptLookupDrafter(tokens_per_match=2, max_draft_tokens=9, max_match=16).start(context())
    short, long = [1, 2, 3, 4, 5, 6, 9, 1], [*range(1, 9)] * 2
    draft = session.propose(sequences(short, long, [4]), [room] * 3)
    assert draft.lengths == [min(2, room), min(9, room), 0]
    assert draft.tokens[1, : draft.lengths[1]].tolist() == [*range(1, 9), 1][:room]


def test_min_match_asks_for_more():
    rows = sequences([1, 2, 3, 1])
    assert PromptLookupDrafter(min_match=1, tokens_per_match=2).start(context()).propose(rows, [5]).lengths == [2]
    assert PromptLookupDrafter(min_match=2).start(context()).propose(rows, [5]).lengths == [0]


@pytest.mark.parametrize(
    "options",
    [{"max_draft_tokens": 0}, {"min_match": 0}, {"min_match": 9, "max_match": 8}, {"num_branches": 0}, {"n": 1}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        PromptLookupDrafter(**options)


# ---------------------------------------------------------------------- in generate


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_greedy_text_is_plain_decodings(lengths, eos, branches):
    same_greedy_text(PromptLookupDrafter(num_branches=branches), lengths, eos)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "four rows"])
def test_nothing_forbidden_is_proposed(lengths, settings, branches):
    proposes_nothing_forbidden(PromptLookupDrafter(num_branches=branches), lengths, settings)


@pytest.mark.grid
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_has_the_targets_distribution(settings, branches):
    assert sampling_p_value(PromptLookupDrafter(num_branches=branches), settings) > 1e-3


def test_the_flag_needs_no_other_argument():
    target = llama()
    ids = torch.tensor([[2, 3, 4, 5] * 5])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    out = target.generate(
        ids, max_new_tokens=20, do_sample=False, speculation_type="prompt_lookup", return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    assert out.speculation.drafted_tokens > 0


def test_a_copy_behind_drafted_tokens_goes_on_in_their_loop():
    index = LookupIndex(8)
    index.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    match = index.longest_match(drafted=[3])
    assert match.length == 6 and index.copy_from(match.positions[0], 8, [3]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index.copy_from(1, 2, [3]) == [1, 2]
