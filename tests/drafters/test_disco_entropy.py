"""DISCO's rule "entropy": it needs no classifier, stops at the bound, and its λ follows acceptance."""

import math

import pytest
import torch
from disco_models import classifier, close_to, propose, tiny
from transformers import LlamaForCausalLM

from hf_specdec import DiscoDrafter, DiscoStoppingCriteria, Drafter, SpeculationError
from hf_specdec.drafters.disco.entropy import STEP, Adapted, EntropyBound, Lambda, bound
from hf_specdec.protocol import Verdict
from hf_specdec.verify.verification import distribution

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny(0, scale=25.0)


@pytest.fixture(scope="module")
def draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    return close_to(target, 1, 0.05)


def entropy(draft: LlamaForCausalLM, **options: object) -> DiscoDrafter:
    return DiscoDrafter(draft, **{"rule": "entropy", "max_draft_tokens": 8} | options)


@pytest.mark.parametrize("factor", [0.0, 0.2, 1.0, 10.0])
def test_the_bound_is_one_minus_the_root_of_the_entropy(factor):
    q = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    nats = [0.0, math.log(4), -0.7 * math.log(0.7) - 0.3 * math.log(0.1)]
    wanted = [max(0.0, 1 - math.sqrt(factor * h)) for h in nats]
    assert bound(q, factor).tolist() == pytest.approx(wanted, abs=1e-6)
    assert EntropyBound(factor).of((q + 1e-30).log(), torch.zeros(3), None) == pytest.approx(wanted, abs=1e-6)
    assert EntropyBound(factor).of(torch.zeros(3, 4), torch.zeros(3), q) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_for_a_target_near_its_draft_it_bounds_the_chance_of_acceptance(scale, noise):
    """With f = 1/2 the bound is Pinsker's wherever the divergence from q to p is at most q's entropy."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(200, 50, generator=generator)
    p, q = (logits + noise * torch.randn(200, 50, generator=generator)).softmax(-1), logits.softmax(-1)
    chance = torch.minimum(p, q).sum(-1)
    near = (q * (q / p).log()).sum(-1) <= torch.special.entr(q).sum(-1)
    assert near.float().mean() > 0.9
    assert (bound(q, 0.5)[near] <= chance[near] + 1e-6).all()


def verdict(accepted: list[int], drafted: list[int]) -> Verdict:
    tokens = [[1] * (n + 1) for n in accepted]
    rows, stopped = list(range(len(accepted))), [False] * len(accepted)
    return Verdict(rows, drafted, accepted, tokens, stopped, width=1, seconds=1.0)


def test_lambda_rises_while_too_little_is_accepted_and_else_falls():
    lam = Lambda(0.5, 0.9)
    rule = Adapted(EntropyBound(0.2), lam, 4)
    rule.observe(verdict([0], [4]))
    assert lam.value == pytest.approx(0.5 + STEP) and lam.rate == pytest.approx(0.45)
    rule.observe(verdict([2, 2], [2, 2]))
    assert lam.value == pytest.approx(0.5 + 2 * STEP) and lam.rate == pytest.approx(0.725)
    for _ in range(3):
        rule.observe(verdict([2], [2]))
    assert lam.rate > 0.9 and lam.value < 0.5 + 4 * STEP
    before = lam.value
    rule.observe(verdict([4], [4]))
    assert lam.value == before, "whole drafts of SLmax leave nothing to gain by a lower λ"
    rule.observe(verdict([0], [0]))
    assert lam.value == before, "nothing was drafted"


@pytest.mark.parametrize(("accepted", "end"), [(0, 1.0), (2, 0.0)])
def test_lambda_stays_between_0_and_1(accepted, end):
    lam = Lambda(0.5, 0.9)
    for _ in range(600):
        lam.observe(accepted, 2, whole=False)
    assert lam.value == end


@pytest.mark.parametrize("do_sample", [False, True])
def test_each_row_stops_at_its_first_token_below_lambda(draft, do_sample):
    drafter = entropy(draft, tau=0.185, tau_sampled=0.185)
    drafted, session = propose(drafter, 6, lockstep=False, do_sample=do_sample)
    assert len(set(drafted.lengths)) > 1
    for b, length in enumerate(drafted.lengths):
        text = torch.tensor([[*range(2 + 5 * b, 7 + 5 * b), 7, *drafted.tokens[b, :length].tolist()]])
        with torch.no_grad():
            q = distribution(draft(text).logits[0, 5:-1])
        said = bound(q, 0.2).tolist()
        assert session.rule.seen[b] == pytest.approx(said, abs=1e-4)
        assert length == next((i for i, chance in enumerate(said, 1) if chance < 0.185), 8)
    alone, _ = propose(drafter, 6, lockstep=True, do_sample=do_sample)
    assert alone.tokens.shape[1] == min(drafted.lengths)


@pytest.mark.parametrize("tau", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_plain_text(target, draft, tau, rows):
    ids = torch.randint(2, 97, (rows, 7), generator=torch.Generator().manual_seed(2))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    drafter = entropy(draft, tau=tau)
    assert torch.equal(plain, target.generate(ids, **options, assistant_model=drafter))
    assert drafter.last_stats.drafted_tokens > 0


def test_lambda_goes_on_from_call_to_call_and_starts_anew_for_another_target(target, draft):
    drafter, options = entropy(draft, tau=0.4), {"max_new_tokens": 24, "do_sample": False}
    for _ in range(2):
        target.generate(PROMPT, **options, assistant_model=drafter)
    learned, fresh = (drafter._lambdas[False].of(model) for model in (target, draft))
    assert learned.value != 0.4 == fresh.value
    assert drafter._lambdas[True].of(target).value == 0.4


def test_without_a_classifier_it_is_saved_loaded_and_named_by_the_flag(target, draft, tmp_path):
    drafter = entropy(draft, tau=0.7, entropy_factor=0.5, acceptance_goal=0.8)
    drafter.save_pretrained(tmp_path, target=target)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = Drafter.from_pretrained(tmp_path)
    assert loaded.config.chosen() == drafter.config.chosen()
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(PROMPT, **options)
    for either in (drafter, loaded):
        assert torch.equal(target.generate(PROMPT, **options, assistant_model=either), plain)
    assert drafter.last_stats.drafted_per_position == loaded.last_stats.drafted_per_position
    flag = {"speculation_type": "disco", "speculation": {"rule": "entropy", "tau": 0.7}}
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft, **flag), plain)


def test_a_trained_drafter_may_go_by_it_and_keeps_its_classifier(draft, tmp_path):
    DiscoDrafter(draft, classifier(), rule="token").save_pretrained(tmp_path / "trained")
    by_entropy = Drafter.from_pretrained(tmp_path / "trained", rule="entropy")
    by_entropy.save_pretrained(tmp_path / "again")
    again = Drafter.from_pretrained(tmp_path / "again", rule="token")
    assert all(map(torch.equal, again.weights().values(), by_entropy.weights().values())) and again.trained


@pytest.mark.parametrize(
    "options", [{"entropy_factor": -0.1}, {"entropy_factor": 11}, {"acceptance_goal": 1.5}, {"acceptance_goal": "high"}]
)
def test_what_does_not_fit_is_refused(draft, options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        entropy(draft, **options)


@pytest.mark.parametrize("rule", ["token", "budget"])
def test_the_other_rules_need_a_classifier_and_say_what_does_not(target, draft, rule):
    with pytest.raises(SpeculationError, match="rule='entropy'"):
        target.generate(PROMPT, assistant_model=DiscoDrafter(draft, rule=rule), max_new_tokens=3)
    with pytest.raises(SpeculationError, match="rule='entropy'"):
        DiscoStoppingCriteria(DiscoDrafter(draft, rule=rule))


def test_the_criterion_stops_plain_generation_where_the_session_stops(draft):
    drafter = entropy(draft, tau=0.195)
    drafted, _ = propose(drafter, 1, lockstep=False)
    ids = torch.tensor([[2, 3, 4, 5, 6, 7]])
    scores = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": 12}
    out = draft.generate(ids, stopping_criteria=[DiscoStoppingCriteria(drafter)], **scores)
    assert out.sequences.shape[1] - 6 == drafted.lengths[0] == 7
