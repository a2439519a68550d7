"""The hybrid: what it measures, what it chooses, and the engine's promises."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from clocks import Clock
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
from toy_heads import ToyHeadDrafter
from transformers.generation.streamers import BaseStreamer

from hf_specdec import Drafter, SpeculationError, SpeculationWarning
from hf_specdec.budget import DRAFTED, Acceptance, Account, Controller, Cost, CostView, DraftCost, Evidence, Tree
from hf_specdec.budget.account import SHARE
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.sources import Copies, Memory, Recycled
from hf_specdec.drafters.suffix import SuffixConfig, SuffixStore
from hf_specdec.protocol import DraftContext, Sequences, Verdict


class Steps(DraftCost):
    """Whatever the draft model of the test takes, its steps take this long."""

    step = 0.0

    def observe(self, *_, **__):
        """Nothing is learned of the clock."""


def known(drafter, target, draft_step, rows=1, sampled=False):
    """What the drafter knows of its draft model, whose steps take so long."""
    experience = drafter._experience.of(target, (rows, sampled))
    experience.cost = Steps()
    experience.cost.step = draft_step
    return experience


def knowing(drafter, target, draft_step, right, told=()):
    """Has it know a target whose forward takes a second whatever its width, and how often its draft model is right."""
    experience = known(drafter, target, draft_step)
    experience.account.left = 0.0
    acceptance = experience.acceptance
    for _ in range(300):
        for i in range(10):
            for rank in range(3):
                acceptance.observe(Evidence.of(DRAFTED, rank), rank == 0 and i < 10 * right)
            for evidence, share in told:
                acceptance.observe(evidence, i < 10 * share)


def likeliest(ids, lengths, rows, logits, count):
    chances, tokens = logits.softmax(-1).topk(count)
    return tokens, chances


def times(rows=1, slope=0.0):
    """A forward takes a second, and more for each further token."""
    cost = Cost()
    for _ in range(9):
        for width in (1, 5, 9):
            cost.observe_forward(rows, width, 1.0 + slope * (width - 1))
    return CostView(cost)


def host(target, rows=1, cost=None):
    return DraftContext(
        prompt_ids=torch.zeros(rows, 3, dtype=torch.long),
        prompt_mask=torch.ones(rows, 3, dtype=torch.long),
        max_length=1000,
        vocab_size=97,
        eos_token_ids=frozenset(),
        do_sample=False,
        lockstep=False,
        trees=True,
        pick=SimpleNamespace(likeliest=likeliest),
        device=torch.device("cpu"),
        stats=SimpleNamespace(draft_calls=0, window=None, notes=[]),
        cost=cost or times(rows),
        target=target,
    )


@pytest.fixture(autouse=True)
def no_grad():
    """As in a call."""
    with torch.no_grad():
        yield


def proposed(drafter, target, text):
    session = drafter.start(host(target, len(text)))
    lengths = [len(tokens) for tokens in text]
    ids = torch.zeros(len(text), max(lengths), dtype=torch.long)
    for row, tokens in zip(ids, text, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return session, session.propose(Sequences(ids, lengths, list(range(len(text))), text), [9] * len(text))


def test_an_unmeasured_draft_model_is_tried():
    target = llama()
    session, draft = proposed(HybridDrafter(llama(seed=1)), target, [[1, 2, 3, 1, 2]])
    assert session.steps.steps > 1 and draft.sources == ["draft_model+prompt_lookup"]


@pytest.mark.parametrize(("right", "asked"), [(0.0, False), (0.9, True)])
def test_a_draft_model_is_asked_where_it_pays(right, asked):
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.2, right)
    session, draft = proposed(drafter, target, [[5, 6, 7, 8]])
    assert (session.steps.steps > 0) is asked and (max(draft.lengths) > 0) is asked


@pytest.mark.parametrize(("copied", "kept", "gained"), [(False, 1, 1.0), (True, 1, 0.0), (False, 0, 0.0)])
def test_it_gains_the_tokens_that_are_kept_and_that_no_copy_proposed(copied, kept, gained, monkeypatch):
    target, drafter, told = llama(), HybridDrafter(llama(seed=1)), []
    knowing(drafter, target, 0.1, 0.9)
    session, _ = proposed(drafter, target, [[5, 6, 7, 8]])
    token = session.grown[0].chain[0]
    if copied:
        join = Copies.join

        def joined(self, trees, *known):
            join(self, trees, *known)
            trees[0].add(-1, token, 0.5, Evidence.of("copied", match=1))

        monkeypatch.setattr(Copies, "join", joined)
        session, _ = proposed(drafter, target, [[5, 6, 7, 8]])
    session.control._price = 0.5
    monkeypatch.setattr(Account, "charge", lambda self, lost: told.append(0.5 - lost))
    verdict = Verdict([0], [1], [kept], [[token, 96][1 - kept :]], [False], 2, 1.0, paths=[[0][:kept]])
    session.observe(verdict)
    assert told == [gained]
    session.observe(Verdict([0], [0], [0], [[96]], [False], 1, 1.0))
    assert told == [gained], "the round before drafted nothing"


def test_a_draft_model_is_not_asked_in_a_round_that_is_to_be_plain(monkeypatch):
    """What it drafted would not be verified."""
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.2, 0.9)
    monkeypatch.setattr(Cost, "tried", lambda *_: 0)
    session, draft = proposed(drafter, target, [[5, 6, 7, 8]])
    assert session.steps.steps == 0 and not session.control._declines and not any(draft.lengths)


def test_a_copy_that_is_always_right_leaves_the_draft_model_nothing_to_do():
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.2, 0.6, [(Evidence.of("copied", match=n), 1.0) for n in range(1, 9)])
    session, draft = proposed(drafter, target, [[5, 6, 7, 8, 9, 10, 5, 6]])
    assert session.steps.steps == 0 and draft.sources == ["prompt_lookup"] and draft.lengths[0] >= 8
    assert draft.tokens[0, :4].tolist() == [7, 8, 9, 10]


def test_a_copy_that_was_never_right_is_hardly_likely_and_judged_all_the_same():
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(
        drafter, target, 5.0, 0.0, [(Evidence.of("copied", branch, n), 0.0) for n in range(1, 9) for branch in (0, 1)]
    )
    session, draft = proposed(drafter, target, [[5, 6, 7, 8, 9, 10, 5, 6]])
    assert draft.sources == ["prompt_lookup"] and 0 < max(draft.survival[0]) < 0.05
    before = drafter._experience.of(target, (1, False)).acceptance.chance(Evidence.of("copied", match=2), 0.5)
    session.observe(Verdict([0], [0], [0], [[7]], [False], 1, 1.0))  # of which nothing was verified
    assert drafter._experience.of(target, (1, False)).acceptance.chance(Evidence.of("copied", match=2), 0.5) > before


def test_both_sources_stand_in_one_tree_each_token_once():
    target = llama()
    for seed in range(6):
        drafter = HybridDrafter(llama(vocab=8, seed=seed), num_candidates=3)
        text = [[1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 0, 1, 2], [6, 5, 4]]
        session, draft = proposed(drafter, target, text)
        for b, tree in enumerate(session.trees):
            tokens = draft.tokens[b].tolist()
            parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[b]
            nodes = list(zip(parents, tokens, strict=True))[: draft.lengths[b]]
            assert len(set(nodes)) == len(nodes) and set(zip(tree.parents, tree.tokens, strict=True)) >= {
                (p, t) for p, t in nodes if p == -1
            }
            assert len(session.grown[b].chain) == session.steps.steps
        assert all("draft_model" in source for source in draft.sources)
        sources = {source for node in session.trees[0].evidence for each in node for source in each.sources}
        assert {source.name for source in sources} >= {"copied", DRAFTED}
        assert {source.rank for source in sources if source.name == DRAFTED} >= {0, 1}


def test_what_was_drafted_is_copied_on_from():
    """The draft model says a word that the text knows: what followed it there is drafted for nothing."""
    target = llama()
    drafter = HybridDrafter(llama(seed=1), num_candidates=1, num_branches=1)
    at = host(target)
    at.pick.likeliest = lambda ids, lengths, rows, logits, count: (torch.tensor([[7]]), torch.tensor([[0.5]]))
    text = [3, 7, 9, 4, 3, 8, 5, 3]
    session = drafter.start(at)
    session.propose(Sequences(torch.tensor([text]), [len(text)], [0], [text]), [9])
    (tree,) = session.trees
    said = {tree.tokens[node]: node for node in tree.children(-1)}
    assert set(said) == {8, 7}, "what followed last, and what is drafted"
    copied = {tree.tokens[node]: tree.evidence[node] for node in tree.children(said[7])}
    assert copied[9][0].sources == Evidence.of("copied", match=2).sources


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_that_was_set_is_drafted_whole(window):
    target, drafter = llama(), HybridDrafter(llama(seed=1), num_draft_tokens=window)
    knowing(drafter, target, 0.2, 0.9)
    session, draft = proposed(drafter, target, [[5, 6, 7, 8]])
    assert session.steps.steps == window == len(session.grown[0].chain)
    node = -1
    for token in session.grown[0].chain:
        node = next(
            i for i, t in enumerate(draft.tokens[0].tolist()) if t == token and draft.depths()[0][i] > 0 and i > node
        )


def test_where_it_has_not_paid_for_long_it_is_asked_again():
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.2, 0.0)
    session = drafter.start(host(target))
    steps = []
    price = 2 * 0.2  # rounds of a second: two steps of the draft model
    for n in range(int(3 * price / SHARE) + 9):
        text = [[5, 6, 7, 8, *range(20, 20 + n % 50)]]
        ids, lengths = torch.tensor(text), [len(text[0])]
        session.sources[0].indexes.clear()
        session.propose(Sequences(ids, lengths, [0], text), [9])
        steps.append(session.steps.steps)
        session.observe(Verdict([0], [0], [0], [[96]], [False], 1, 1.0))
    asked = [n for n, step in enumerate(steps) if step]
    expected = [price / SHARE] * 3
    assert [b - a for a, b in itertools.pairwise([-1, *asked])] == pytest.approx(expected, abs=3)


def test_rounds_without_the_draft_model_are_counted_from_call_to_call():
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.2, 0.0)
    steps = []
    for _ in range(int(3.5 * 2 * 0.2 / SHARE)):
        session, _ = proposed(drafter, target, [[5, 6, 7, 8]])
        steps.append(session.steps.steps)
        session.observe(Verdict([0], [0], [0], [[96]], [False], 1, 1.0))
    assert [n > 0 for n in steps].count(True) == 3 and max(steps) > 1


@pytest.mark.parametrize("alpha", [0.02, 0.9])
def test_draws_come_back_where_they_have_not_paid(alpha):
    """Copies that are never right, and a draft model that is taken to be as bad: it is looked at again."""
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    experience = known(drafter, target, 0.05, sampled=True)
    experience.account.left = 0.0
    for n in range(4000):
        experience.acceptance.observe(Evidence.of(DRAFTED), n % 100 < 100 * alpha)
    at = host(target, cost=times(slope=0.05))
    at.do_sample, at.pick = True, lambda ids, columns, rows, logits: (logits.argmax(-1), logits.softmax(-1))
    session = drafter.start(at)
    text, drew = [5, 6, 7, 8, 5, 6], []
    for _ in range(60):
        with torch.no_grad():
            session.propose(Sequences(torch.tensor([text]), [6], [0], [text]), [9])
        drew.append(sum(session.draws))
        session.observe(Verdict([0], [sum(session.draws)], [0], [[96]], [False], 1, 1.0))
    assert 0 < drew.count(0) < 60 if alpha < 0.5 else drew[0] > 0


def test_a_batch_in_step_goes_on_when_a_row_has_finished():
    """Rows of a lockstep batch stay in it when they are finished, and draft nothing more."""
    target, drafter = llama(), HybridDrafter(llama(seed=1))
    knowing(drafter, target, 0.1, 0.9)
    at = host(target, 2)
    at.lockstep = True
    session = drafter.start(at)
    known(drafter, target, 0.1, rows=2)
    text = [[5, 6, 7, 8], [5, 6, 7, 9]]
    draft = session.propose(Sequences(torch.tensor(text), [4, 4], [0, 1], text), [9, 0])
    assert draft.lengths[0] > 1 and draft.lengths[1] == 0


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


def now_and_then(monkeypatch):
    """Has the draft model asked in every third round."""
    turn = iter(range(10**6))
    monkeypatch.setattr(Account, "missing", lambda self, price: 1)
    monkeypatch.setattr(Controller, "_price_of_try", lambda self, drafted: 1.0)
    monkeypatch.setattr(
        Controller,
        "_steps_that_pay",
        lambda self, drafted, enough: 3 if drafted.steps or next(turn) % 3 == 0 else 0,
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    "options",
    [{}, {"num_draft_tokens": 2, "num_branches": 3}, {"memory_mb": 1}],
    ids=["chain", "tree", "memory"],
)
@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "four rows"])
def test_neither_part_proposes_what_is_forbidden(lengths, settings, options, monkeypatch):
    now_and_then(monkeypatch)
    proposes_nothing_forbidden(HybridDrafter(llama(vocab=8, seed=1), **options), lengths, settings)


# ---------------------------------------------------------------------- without a draft model


@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_without_a_model_greedy_text_is_plain_decodings(lengths, eos):
    stats = same_greedy_text(HybridDrafter(memory_mb=1), lengths, eos)
    assert stats.drafted_tokens and not stats.draft_calls
    kinds = {source.kind for source in (Copies, Memory, Recycled)}
    assert {part for name in stats.sources for part in name.split("+")} <= kinds | {"none"}


@pytest.mark.grid
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.usefixtures("width_costs_nothing")
def test_without_a_model_sampled_text_has_the_targets_distribution(settings):
    assert sampling_p_value(HybridDrafter(memory_mb=1), settings) > 1e-3


@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
def test_without_a_model_nothing_forbidden_is_proposed(settings):
    proposes_nothing_forbidden(HybridDrafter(memory_mb=1), [3, 14, 1, 9], settings)


@pytest.mark.usefixtures("width_costs_nothing")
def test_without_a_model_all_three_sources_draft():
    target, drafter, found = llama(vocab=8), HybridDrafter(memory_mb=1), set()
    for length in (9, 9, 14):
        target.generate(**prompts([length], 8), max_new_tokens=64, do_sample=False, assistant_model=drafter)
        found |= {part for name in drafter.last_stats.sources for part in name.split("+")}
    assert found >= {"prompt_lookup", "recycled", "suffix"}


def test_without_a_model_it_is_a_flag_and_a_folder(tmp_path):
    target, inputs = llama(), prompts([9]) | {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**inputs)
    out = target.generate(
        **inputs, speculation_type="hybrid", speculation={"memory_mb": 1}, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain) and out.speculation.mode != "plain"
    HybridDrafter(memory_mb=2).save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, HybridDrafter) and loaded.draft_model is None and loaded.config.memory_mb == 2
    assert torch.equal(target.generate(**inputs, assistant_model=loaded), plain)
    draft = llama(seed=1)
    assert Drafter.from_pretrained(tmp_path, draft_model=draft).draft_model is draft


@pytest.mark.parametrize("options", [{"num_draft_tokens": 3}, {"num_candidates": 2}])
def test_without_a_model_its_options_are_refused(options):
    with pytest.raises(SpeculationError, match=f"{next(iter(options))}=. is the draft model's"):
        HybridDrafter(**options)


# ---------------------------------------------------------------------- sampled


@pytest.mark.grid
@pytest.mark.parametrize(
    "options",
    [{}, {"num_draft_tokens": 2, "num_branches": 3}, {"memory_mb": 1}],
    ids=["chain", "tree", "memory"],
)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_has_the_targets_distribution(settings, options):
    drafter = HybridDrafter(llama(vocab=SMALL, seed=1), **options)
    assert sampling_p_value(drafter, settings) > 1e-3


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_sources_may_change_at_every_round(lengths, monkeypatch):
    """Whatever was chosen, the draft model finds its way back into the text."""
    now_and_then(monkeypatch)
    target = llama(vocab=8)
    drafter = HybridDrafter(target, num_draft_tokens=3, num_recycled=0)  # all that the target drafts is accepted
    inputs = prompts(lengths, 8)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
    stats = drafter.last_stats
    asked = sum(count for name, count in stats.sources.items() if "draft_model" in name)
    assert {"prompt_lookup"} < set(stats.sources) and asked
    assert stats.accepted_tokens >= 2 * asked


@pytest.mark.usefixtures("width_costs_nothing")
@pytest.mark.parametrize("positions", [8, 24], ids=["shorter than the prompts", "ends in the text"])
@pytest.mark.parametrize("lengths", [[12], [12, 12], [9, 12, 3]], ids=["one row", "equal rows", "uneven rows"])
def test_past_the_draft_models_context_the_lookup_goes_on_alone(lengths, positions, recwarn):
    target, inputs = llama(vocab=8), prompts(lengths, 8)
    drafter = HybridDrafter(llama(vocab=8, max_position_embeddings=positions), num_draft_tokens=3, num_recycled=0)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
    stats = drafter.last_stats
    asked = sum(count for name, count in stats.sources.items() if "draft_model" in name)
    assert (asked > 0) is (positions > 12) and stats.sources["prompt_lookup"]
    # More than the draft model's windows of three can have given: copies were accepted, too.
    assert stats.accepted_tokens > 3 * asked
    assert not [w for w in recwarn if issubclass(w.category, SpeculationWarning)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_what_was_written_before_is_remembered(lengths, sampled):
    """Beside a draft model that is hardly ever right. Nothing is, without a memory."""
    target, inputs = llama(), prompts(lengths)
    options = {"max_new_tokens": 40, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    options |= {"temperature": 1e-4} if sampled else {}  # nearly greedy: it writes the same again
    plain, accepted = target.generate(**inputs, **options | {"do_sample": False, "temperature": None}), {}
    for memory in (0, 1):
        drafter = HybridDrafter(llama(seed=1), memory_mb=memory)
        for _ in range(2):
            torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
        accepted[memory] = drafter.last_stats.accepted_tokens
        assert sampled or (memory > 0) is any("suffix" in name for name in drafter.last_stats.sources)
    assert accepted[1] > accepted[0] + 20


@pytest.mark.eager  # a model whose forward is replaced is not captured
@pytest.mark.parametrize("kind", ["alone", "with copies"])
def test_a_head_that_is_never_right_is_seldom_asked(kind, monkeypatch):
    """Its call takes as long as a round: at 1% of the rounds it may be tried once or twice in a call."""
    target, inputs = llama(), prompts([9]) | {"max_new_tokens": 128, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**inputs)
    head = ToyHeadDrafter(plain.tolist(), right=False)
    drafter, clock = head if kind == "alone" else HybridDrafter(head), Clock(monkeypatch)
    with clock.moved_by(target, lambda width: 1.0):
        for _ in range(2):
            before = len(head.rows)
            assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)
    assert len(head.rows) - before <= 4
    assert any(note.startswith("the head was not used in ") for note in drafter.last_stats.notes)


def test_texts_that_were_cut_short_are_remembered_and_memory_is_bounded():
    target, drafter = llama(), HybridDrafter(llama(seed=1), memory_mb=1)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts([9]), max_new_tokens=40, assistant_model=drafter, streamer=Interrupting(6))
    held = len(drafter.store)
    assert 9 < held < 30 and drafter.store.num_bytes <= 1 << 20
    target.generate(**prompts([9]), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert len(drafter.store) > held


def test_rows_that_have_ended_are_not_remembered_again():
    """In lockstep they stay in the batch, and padding follows them."""
    store, (row, text) = SuffixStore(1), (0, [5, 6, 7, 8])
    memory = Memory(host(llama()), SuffixConfig(), store, Acceptance())
    sequences = Sequences(torch.tensor([text]), [4], [row], [text])
    for room, stopped in ((9, True), (0, True), (0, True)):
        memory.join([Tree()], sequences, [room])
        memory.observe(Verdict([row], [0], [0], [[0]], [stopped], 1, 1.0))
    memory.close()
    assert len(store) == 6  # the text with one token more, and its end


class Interrupting(BaseStreamer):
    """Ctrl-C after so many pieces of text."""

    def __init__(self, pieces):
        self.left = pieces

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_it_comes_back_from_its_folder(tmp_path):
    HybridDrafter(llama(seed=1), num_draft_tokens=4, max_match=5, memory_mb=2).save_pretrained(str(tmp_path))
    loaded = Drafter.from_pretrained(str(tmp_path))
    assert isinstance(loaded, HybridDrafter)
    assert (loaded.config.num_draft_tokens, loaded.config.max_match) == (4, 5)
    assert loaded.store is not None and loaded.store.num_bytes <= 2 << 20


@pytest.mark.eager  # what a forward is padded to is filled
@pytest.mark.parametrize("most", [0, 64])
def test_copies_beside_a_fixed_window_are_verified_where_a_plain_round_is_wished_for(monkeypatch, most):
    """Behind a chain that was asked for no round is plain; but none is wider than what is known of widths allows."""
    monkeypatch.setattr(Cost, "tried", lambda *_: 0)
    monkeypatch.setattr(Cost, "round", lambda *_: lambda width: 1.0)
    monkeypatch.setattr(Cost, "most", lambda *_: most)
    target, drafter = llama(), HybridDrafter(llama(seed=1), num_draft_tokens=2)
    inputs = prompts([9]) | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), target.generate(**inputs))
    assert (max(drafter.last_stats.verify_widths) > 3) is (most > 0)


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"max_match": 0}, {"max_draft_tokens": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        HybridDrafter(llama(), **options)
