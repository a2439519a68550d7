"""DISCO's stop rule: it decides how much is drafted, and never what is said."""

import json
from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from clocks import Clock
from disco_models import STOPS, classifier, close_to, context, propose, tiny
from safetensors.torch import load_file, save_file

from hf_specdec import Drafter, SpeculationError
from hf_specdec.budget import DRAFTED, Controller, Cost, CostView, DraftCost, Drafted, Evidence, Experience, Learned
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.disco import (
    DiscoDrafter,
    DiscoStoppingCriteria,
    Threshold,
    features,
)
from hf_specdec.drafters.disco.classifier import LEAST, NONE, Branch, Recurrence, _on_device, _on_host, read
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.rules import Stepwise, spoken_for


@pytest.fixture(scope="module")
def target():
    return tiny(0, scale=25.0)


@pytest.fixture(scope="module")
def draft(target):
    return close_to(target, 1, 0.05)


def test_features_are_the_top_probabilities_entropy_position_lookup_and_token():
    logits = torch.tensor([[0.0, 1.0, 3.0, -1e4], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 3.0, -1e4], [0.0, 1.0, 3.0, -1e4]])
    tokens = torch.tensor([2, 1, 1, 3])
    x = features(logits, tokens, [0, 9, 0, 0], [2, NONE, 1, 2], k=3)
    p = logits.softmax(-1)
    assert x.shape == (4, 9)
    assert torch.allclose(x[:, :3], p.sort(descending=True).values[:, :3])
    assert torch.allclose(x[:, 3], torch.special.entr(p).sum(-1), atol=1e-6)
    assert torch.allclose(x[:, 4], torch.tensor([1.0, 10.0, 1.0, 1.0]).log())
    assert x[:, 5:8].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 0]], "any, the best token, the drafted token"
    assert torch.allclose(x[:, 8], logits.log_softmax(-1)[range(4), tokens].clamp_min(LEAST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("known", [300, 40, 8], ids="{} known tokens".format)
def test_features_are_the_same_on_host_and_accelerator(scale, dtype, known):
    """Of a cut draft most tokens have the lowest logit there is."""
    torch.manual_seed(0)
    logits = (scale * torch.randn(5, 300) + 40).to(dtype)
    logits[:, known:] = torch.finfo(dtype).min
    tokens = torch.tensor([0, 7, 3, 2, 310])  # the last one is the target's alone
    host, device = _on_host(logits, tokens, 10), _on_device(logits, tokens, 10)
    (top, best, entropy, log_q, drafted), (top2, best2, entropy2, log_q2, drafted2) = host, device
    assert np.allclose(top, top2, rtol=1e-5) and np.allclose(entropy, entropy2, rtol=1e-5, atol=2e-5)
    assert np.allclose(log_q, log_q2, rtol=1e-5, atol=2e-5) and drafted == drafted2 == tokens.tolist()
    assert np.isfinite(entropy).all() and (np.diff(top) <= 0).all()
    rows = np.arange(5)
    assert torch.equal(logits[rows, best], logits[rows, best2])  # the tokens themselves may be tied in bfloat16


@pytest.mark.parametrize("sees_token", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_classifier_of_a_generation_is_the_trained_one(do_sample, sees_token):
    generator = torch.Generator().manual_seed(1)
    made, logits = classifier(3 * sees_token, sees_token=sees_token), 3 * torch.randn(6, 50, generator=generator)
    where = ([0, 1, 5, 40, 90, 200], [3, NONE, 7, int(logits[3].argmax()), NONE, 1])

    def chances(tokens):
        said = made.reader(do_sample)(read(logits, tokens, 4), *where)
        wanted = made(features(logits, tokens, *where, k=4))[:, int(do_sample)].sigmoid()
        assert said == pytest.approx(wanted.tolist(), abs=1e-5)
        return said

    first, second = chances(torch.arange(6)), chances(torch.arange(6) + 9)
    assert max(first) - min(first) > 0.1
    assert (first == second) == (not sees_token), "one trained without it does not look at the token"


def test_a_branch_looks_up_its_own_tokens_first_and_leaves_the_text_alone():
    text = Recurrence([1, 2, 3, 4, 9, 1, 2, 3])
    assert text.proposal() == 4
    branch = Branch(text)
    for token in (5, 1, 2, 3):
        branch.append(token)
    assert (branch.proposal(), text.proposal()) == (5, 4)
    assert Recurrence([1, 2, 3]).proposal() == NONE


@pytest.mark.parametrize(
    "tau, rule, candidates", [*product([0.0, 0.5, 1.0], ["token"], [1]), *product([0.4], ["budget"], [1, 3])]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_plain_text(target, draft, rule, tau, candidates, rows):
    torch.manual_seed(2)
    ids = torch.randint(2, 97, (rows, 7))
    mask = torch.ones_like(ids)
    mask[:-1, :2] = 0  # left padding in all rows but the last
    ids = ids.masked_fill(mask == 0, 0)
    plain = target.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    drafter = DiscoDrafter(draft, classifier(), rule=rule, tau=tau, max_draft_tokens=6, num_candidates=candidates)
    fast = target.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, assistant_model=drafter
    )
    assert torch.equal(plain, fast)
    drafted = drafter.last_stats.drafted_per_position
    assert max(drafted) <= 5
    if tau == 1.0:
        assert set(drafted) == {0}, "below a chance of 1 a draft ends after its first token"
    if tau == 0.0 and rows == 1:
        assert drafted[5] > 0


@pytest.mark.parametrize("step", [0.05, 0.5])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.eager  # its clock is moved by the models' own forwards
def test_the_budget_drafts_as_far_as_that_pays(target, right, step, monkeypatch):
    """Whatever its classifier says: chances are what came true. By a clock that only forwards move."""
    # Other tests use this target by real clocks.
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    draft = close_to(target, 1, 0.0) if right else tiny(9, scale=25.0)
    drafter, prompt = DiscoDrafter(draft, classifier(), rule="budget", max_draft_tokens=8), torch.arange(2, 9)[None]
    clock, taken = Clock(monkeypatch), []
    with clock.moved_by(target, lambda width: 1.0 + 0.02 * width), clock.moved_by(draft, lambda width: step):
        for _ in range(3):
            clock.now = 0.0
            target.generate(input_ids=prompt, max_new_tokens=100, do_sample=False, assistant_model=drafter)
            taken.append(clock.now)
    notes = drafter.last_stats.notes
    if right:
        assert taken[-1] < (0.35 if step < 0.1 else 0.9) * 102 and not notes
    else:
        assert taken[-1] < (1.06 if step < 0.1 else 1.12) * 102 and "the draft model was not used" in notes[0]


@pytest.mark.parametrize("candidates", [1, 3])
def test_what_the_draft_thinks_of_next_is_verified_beside_it(target, candidates, monkeypatch):
    """Its second choice is always the right one. By a clock that only forwards move."""
    draft, prompt, clock = close_to(target, 1, 0.0), torch.arange(2, 9)[None], Clock(monkeypatch)

    def second_before_first(module, args, kwargs, output):
        best = output.logits.topk(2)
        output.logits = output.logits.scatter(-1, best.indices, best.values.flip(-1))
        return output

    drafter = DiscoDrafter(draft, classifier(), max_draft_tokens=8, num_candidates=candidates)
    with clock.moved_by(target, lambda width: 1.0 + 0.02 * width), clock.moved_by(draft, lambda width: 0.05):
        draft.register_forward_hook(second_before_first, with_kwargs=True)
        target.generate(input_ids=prompt, max_new_tokens=100, do_sample=False, assistant_model=drafter)
    assert drafter.proposes_trees is (candidates > 1)
    accepted = drafter.last_stats.accepted_tokens
    assert accepted > 40 if candidates > 1 else accepted == 0


def test_rows_stop_separately_and_in_lockstep_together(draft, monkeypatch):
    said, lengths = [], Threshold.lengths

    def noted(self, i, step, drafted):
        said.append(spoken_for(step))
        return lengths(self, i, step, drafted)

    monkeypatch.setattr(Threshold, "lengths", noted)
    drafter = DiscoDrafter(draft, classifier(STOPS), tau=0.3, rule="token", max_draft_tokens=8)
    ragged, _ = propose(drafter, 6, lockstep=False)
    assert len(set(ragged.lengths)) > 1
    for seen, length in zip(zip(*said, strict=True), ragged.lengths, strict=True):
        assert length == next((i for i, chance in enumerate(seen, 1) if chance < 0.3), 8)
    alone, _ = propose(drafter, 6, lockstep=True)
    assert alone.tokens.shape[1] == min(ragged.lengths)


@pytest.mark.grid
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("rule", ["token", "budget", "token, seen", "budget, seen", "the draft's own chances"])
def test_sampled_text_has_the_targets_distribution_and_a_token_dropped_after_a_look_is_caught(
    rule, verification, planted, monkeypatch
):
    """A rule may look at the drawn token, as those that are "seen" do, and decides about the next one."""
    rule, _, seen = rule.partition(", ")
    each = rule == "token"  # the budget decides for the batch
    vocab, rows, calls = (6, 600, 8) if each else (6, 10, 300)
    target, other = tiny(4, vocab, scale=30.0), tiny(5, vocab, scale=30.0)
    drafter = DraftModelDrafter(other)
    if rule in ("token", "budget"):
        made = classifier(1, k=4, sees_token=bool(seen))
        drafter = DiscoDrafter(other, made, tau_sampled=0.4, max_draft_tokens=3, rule=rule)
    monkeypatch.setattr(Controller, "plan", lambda self, drafted, most, enough=1: most)
    monkeypatch.setattr(Controller, "goes_on", lambda self, drafted: pays_by_what_is_seen(drafted))
    if planted:
        honest = ChainSession.propose

        def propose_what_looks_good(self, sequences, room):
            draft = honest(self, sequences, room)
            for b, k in enumerate(draft.lengths):  # drops a token after having seen it
                if k and int(draft.tokens[b, k - 1]) % 2:
                    draft.lengths[b] = k - 1
            return draft

        monkeypatch.setattr(ChainSession, "propose", propose_what_looks_good)
    prompt = torch.tensor([[2, 3, 4]])
    counts, drafted = torch.zeros(vocab**2), Counter()
    torch.manual_seed(6)
    for _ in range(calls):
        out = target.generate(
            input_ids=prompt.expand(rows, -1),
            attention_mask=torch.ones(rows, 3, dtype=torch.long),
            max_new_tokens=4,
            do_sample=True,
            top_k=0,
            assistant_model=drafter,
            speculation={"verification": verification},
        )
        counts += torch.bincount(out[:, 4] * vocab + out[:, 5], minlength=vocab**2)
        drafted.update(drafter.last_stats.drafted_per_position)
    expected = _pairs(target, prompt, vocab) * rows * calls
    assert drafted[1] > 0 and (each or drafted[1] < 0.9 * drafted[0]) and drafter.last_stats.rejections > 0
    chi2 = float(((counts - expected) ** 2 / expected.clamp_min(1e-9))[expected > 5].sum())
    freedom = int((expected > 5).sum()) - 1
    limit = freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations
    assert (chi2 > limit) == planted, (chi2, limit)


def pays_by_what_is_seen(drafted):
    """A decision that hangs on all that may be known, and on no clock."""
    return sum(map(sum, drafted.chances)) > 0.3 * len(drafted.chances)


def test_the_budget_weighs_a_step_by_what_was_said_and_by_what_came_of_it():
    opened, cost = context(2, do_sample=True, lockstep=False), Cost()
    opened.cost = CostView(cost)
    for _ in range(9):
        for rows in (1, 2):
            for width in (1, 2, 9):
                cost.observe_forward(rows, width, 1 + 0.02 * (width - 1))
    experience, evidence = Experience(), Evidence.of(DRAFTED)
    for _ in range(200):  # who is sure is right, who is not is wrong
        for said, right in ((0.95, True), (0.95, True), (0.1, False)):
            experience.acceptance.observe(evidence.at(said), right)
            experience.acceptance.observe(evidence, right)

    def pays(seen, open, step, length=0):
        opened.most_rows, opened.max_length = (0, 5 + length) if length else (2, 200)
        experience.cost = DraftCost()
        for _ in range(3):
            experience.cost.observe(3, step, 3 * step)
        rule, rows = Stepwise(Controller(opened, experience)), list(range(len(seen)))
        rule.begin(Drafted(rows, [[]] * len(rows), [1.0] * len(rows)), [9] * len(rows), 9)
        rule.seen, rule.control._price = seen, 0.0
        return rule.control.goes_on(rule._drafted(open))

    assert pays([[0.95]], [True], 0.1)
    assert not pays([[0.95]], [True], 2.0)
    assert not pays([[0.95, 0.1]], [True], 0.1)
    assert not pays([[0.95]], [False], 0.1), "nobody drafts on"
    assert pays([[]], [True], 0.1) and not pays([[]], [True], 2.0)
    rows = [[0.95], [0.1]], [True, False]
    assert pays(*rows, 0.1), "one row is enough"
    assert not pays(*rows, 0.1, length=64), "the other one ends the call"
    for _ in range(400):
        experience.acceptance.observe(evidence.at(0.95), False)  # who says so is believed no more
        experience.acceptance.observe(evidence, False)
    assert not pays([[0.95]], [True], 0.1)


@torch.no_grad()
def _pairs(target, prompt, vocab):
    """Exact distribution of the second and third new token."""
    pairs = torch.zeros(vocab, vocab)
    first = target(prompt).logits[0, -1].softmax(-1)
    for x in range(vocab):
        second = target(torch.cat([prompt, torch.tensor([[x]])], 1)).logits[0, -1].softmax(-1)
        ends = torch.cat([prompt.expand(vocab, -1), torch.full((vocab, 1), x), torch.arange(vocab)[:, None]], 1)
        pairs += first[x] * second[:, None] * target(ends).logits[:, -1].softmax(-1)
    return pairs.flatten()


def test_a_seeded_sampled_call_repeats(target, draft):
    drafter = DiscoDrafter(draft, classifier(), rule="token", tau_sampled=0.3)
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        ids = torch.tensor([[5, 6, 7]])
        texts.append(target.generate(ids, max_new_tokens=20, do_sample=True, assistant_model=drafter).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("sees_token", [False, True])
def test_saved_and_loaded_it_stops_at_the_same_places(target, draft, tmp_path, sees_token):
    made = classifier(sees_token=sees_token)
    drafter = DiscoDrafter(draft, made, tau=0.35, rule="token", max_draft_tokens=5)
    drafter.save_pretrained(tmp_path, target=target)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, DiscoDrafter) and loaded.config.tau == 0.35
    assert loaded.classifier.sees_token == loaded.config.sees_token == sees_token
    ids = torch.tensor([[5, 6, 7]])
    for either in (drafter, loaded):
        target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=either)
    assert drafter.last_stats.drafted_per_position == loaded.last_stats.drafted_per_position


def test_folders_of_before_there_was_the_token_load(draft, tmp_path):
    DiscoDrafter(draft, classifier()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("sees_token")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_file(tmp_path / "model.safetensors")["inner.weight"].shape == (8, 8), "k + 4 features"
    assert not Drafter.from_pretrained(tmp_path).classifier.sees_token


def test_what_does_not_fit_is_refused(target, draft, tmp_path):
    DiscoDrafter(draft, classifier()).save_pretrained(tmp_path)
    with pytest.raises(SpeculationError, match="another draft model"):
        Drafter.from_pretrained(tmp_path, draft_model=target)
    wide = load_file(tmp_path / "model.safetensors")
    wide["inner.weight"] = torch.zeros(8, 14)
    save_file(wide, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeculationError, match=r"inner\.weight"):
        Drafter.from_pretrained(tmp_path)
    with pytest.raises(SpeculationError, match="train disco"):
        target.generate(torch.tensor([[5]]), assistant_model=DiscoDrafter(draft), max_new_tokens=3)
    for options in ({"tau": 1.5}, {"max_draft_tokens": 0}, {"rule": "draft"}, {"nope": 1}):
        with pytest.raises(SpeculationError):
            DiscoDrafter(draft, **options)
    with pytest.raises(SpeculationError, match="vocabulary"):
        DiscoDrafter(draft, k=98)


def test_another_dtype_is_the_same_draft(target, draft):
    made = DiscoDrafter(draft, classifier())
    again = close_to(target, 1, 0.05).to(torch.bfloat16)
    DiscoDrafter(again, classifier(), draft_fingerprint=made.config.draft_fingerprint)


SCORES = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": 12}


@pytest.mark.parametrize("sees_token", [False, True])
def test_the_criterion_stops_plain_generation_where_the_session_stops(draft, sees_token):
    made = classifier(STOPS, sees_token=sees_token)
    drafter = DiscoDrafter(draft, made, tau=0.3, rule="token", max_draft_tokens=8)
    ids = torch.cat([context(6, False, False).prompt_ids, torch.full((6, 1), 7)], 1)
    criterion = DiscoStoppingCriteria(drafter, prompt_length=5)
    drafted, _ = propose(drafter, 6, lockstep=False)
    for row, length in zip(ids, drafted.lengths, strict=True):
        out = draft.generate(input_ids=row[None], stopping_criteria=[criterion], **SCORES)
        assert out.sequences.shape[1] - 6 == length
    together = draft.generate(input_ids=ids, stopping_criteria=[criterion], **SCORES)
    assert together.sequences.shape[1] - 6 == max(drafted.lengths)
    with pytest.raises(SpeculationError, match="output_scores"):
        draft.generate(input_ids=ids, stopping_criteria=[criterion], max_new_tokens=3)


def test_the_criterion_drives_transformers_own_loop(target, draft, monkeypatch):
    drafter = DiscoDrafter(draft, classifier(STOPS), tau=0.3, rule="token", max_draft_tokens=8)
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    lengths = []

    def generate(own, **kwargs):
        out = own(**kwargs, stopping_criteria=[DiscoStoppingCriteria(drafter, prompt_length=3)])
        lengths.append(len(out.scores))
        return out

    monkeypatch.setattr(draft, "generate", partial(generate, draft.generate))
    monkeypatch.setattr(draft.generation_config, "num_assistant_tokens", 8)
    monkeypatch.setattr(draft.generation_config, "assistant_confidence_threshold", 0.0)
    assisted = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=draft)
    assert torch.equal(plain, assisted)
    assert len(set(lengths)) > 1 and max(lengths) <= 8
