"""The forwards of a benchmark: given a pace, counted, timed alone, asked where texts differ."""

import pickle
import time
from contextlib import nullcontext

import models
import pytest
import torch
from laboratory import script
from traced import traced
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import DraftModelDrafter
from hf_specdec.errors import SpeculationError
from hf_specdec.tools.bench.methods import build_method
from hf_specdec.tools.instruments.audit import Audit, Difference, first_difference
from hf_specdec.tools.instruments.meter import Forward, Meter, metered

pretended = script("pretended")
PROMPT = torch.tensor([[5, 9, 3, 17, 4, 8]])
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(seed: int, layers: int = 2) -> LlamaForCausalLM:
    """Weights large enough that greedy text does not repeat one token."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": layers}, intermediate_size=48, eos_token_id=None)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def plain(model, tokens: int = 24) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=tokens, do_sample=False)[0].tolist()


# ------------------------------------------------------------------ pacing, synthetic acceptance


def test_pacing_takes_no_processor_time_and_changes_nothing() -> None:
    model = llama(0)
    tokens = plain(model, 8)
    with pretended.paced(model, 30):
        cpu, wall = time.process_time(), time.perf_counter()
        assert plain(model, 8) == tokens
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert wall >= 8 * 0.030  # never less than was set
    assert "forward" not in vars(model)
    with pytest.raises(SpeculationError, match="above 0"), pretended.paced(model, 0):
        pass


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("milliseconds", [5.0, 20.0])
def test_pace_is_within_2_percent(milliseconds: float) -> None:
    model = llama(0)
    with pretended.paced(model, milliseconds), metered(model) as meter:
        plain(model, 50)
    seconds = sorted(forward.seconds for forward in meter.forwards)
    assert seconds[len(seconds) // 2] == pytest.approx(milliseconds / 1000, rel=0.02)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_synthetic_acceptance_sets_what_both_loops_accept(acceptance: float) -> None:
    target, draft = llama(0), llama(1, layers=1)
    tokens = plain(target, 200)
    for spec in ("hf-assisted:num_assistant_tokens=4", "draft_model:num_draft_tokens=4"):
        method = build_method(spec, draft)
        with (
            method.prepared(),
            pretended.synthetic_acceptance(draft, tokens, acceptance),
            metered(target, draft) as meter,
        ):
            output = target.generate(PROMPT, max_new_tokens=200, do_sample=False, **method.kwargs)
        assert output[0].tolist() == tokens
        rounds = meter.accepted_per_round(PROMPT.shape[1], 200)
        tested = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
        assert sum(accepted for _, accepted in rounds) / tested == pytest.approx(acceptance, abs=0.12), spec
    with (
        pytest.raises(SpeculationError, match=r"from 0 to 1, got 1\.5"),
        pretended.synthetic_acceptance(draft, tokens, 1.5),
    ):
        pass


# ------------------------------------------------------------------ forwards


def test_meter_sees_every_forward_and_what_was_accepted() -> None:
    target, draft = llama(0), llama(0, layers=1)
    with metered(target) as meter:
        plain(target, 10)
    assert [(f.role, f.width, f.context) for f in meter.forwards] == [("target", 6, 0)] + [
        ("target", 1, 6 + i) for i in range(9)
    ]
    assert meter.accepted_per_round(6, 10) == [(0, 0)] * 10
    assert meter.decode_seconds + meter.prefill_seconds == meter.seconds
    for spec in ("hf-assisted:num_assistant_tokens=3", "draft_model:num_draft_tokens=3"):
        method = build_method(spec, draft)
        for _ in range(2):  # a first call may try out what the models can do
            with method.prepared(), metered(target, draft) as meter:
                target.generate(PROMPT, max_new_tokens=20, do_sample=False, **method.kwargs)
        rounds = meter.accepted_per_round(6, 20)
        assert sum(accepted + 1 for _, accepted in rounds) == 20, spec
        assert all(0 <= accepted <= drafted <= 3 for drafted, accepted in rounds)
        stats = method.drafter.last_stats if method.drafter else None
        assert stats is None or stats.accepted_tokens == sum(accepted for _, accepted in rounds)


def test_a_metered_model_can_be_sent_to_another_process() -> None:
    model = llama(0)
    with metered(model):
        copied = pickle.loads(pickle.dumps(model))
    assert "forward" not in vars(model)
    torch.testing.assert_close(copied(PROMPT).logits, model(PROMPT).logits)


def test_rounds_of_a_loop_that_drafts_before_the_prefill() -> None:
    made = [Forward("target", 1, 8, 0, 0.0), Forward("target", 1, 3, 7, 0.0), Forward("target", 1, 3, 10, 0.0)]
    # A prompt of 6 with 2 drafted tokens, of which 1 was right; then 2 of 2; then 0 of 2.
    assert Meter(forwards=made).accepted_per_round(6, 6) == [(2, 1), (2, 2), (2, 0)]


# ------------------------------------------------------------------ audit


def test_audit_finds_the_first_difference_and_its_gap() -> None:
    model = llama(0)
    mine = plain(model, 12)[PROMPT.shape[1] :]
    assert Audit(model, PROMPT, mine).difference(mine) is None
    logits = model(torch.tensor([PROMPT[0].tolist() + mine[:4]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = Audit(model, PROMPT, mine).difference([*mine[:4], second, 1, 2])
    assert found is not None and (found.position, found.plain_token, found.other_token) == (4, mine[4], second)
    assert found.gap == pytest.approx((logits[mine[4]] - logits[second]).item(), abs=1e-3)
    assert found.top_two and not found.near_tie
    assert first_difference([1, 2], [1, 2, 3]) == 2
    shorter = Audit(model, PROMPT, mine).difference(mine[:5])
    assert shorter is not None and shorter.gap is None and shorter.other_token is None


@pytest.mark.parametrize(
    ("steps", "top_two", "near"), [(4, True, True), (4.1, True, False), (2, False, True), (2.1, False, False)]
)
def test_a_near_tie_is_what_rounding_explains(steps: float, top_two: bool, near: bool) -> None:
    """Three may be as good as equal: the third of them is a tie, too, if it is nearer."""
    assert Difference(3, 1, 2, steps * 0.125, 0.125, top_two).near_tie == near
    assert not Difference(3, 1, None, None, None, top_two).near_tie


def test_one_decoding_serves_all_differences_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(0)
    mine = plain(model, 12)[PROMPT.shape[1] :]
    audit, calls, generate = Audit(model, PROMPT, mine), [], model.generate
    monkeypatch.setattr(model, "generate", lambda *a, **k: calls.append(k["max_new_tokens"]) or generate(*a, **k))
    for position in (8, 3, 8, 5, 10):
        found = audit.difference([*mine[:position], (mine[position] + 1) % 90])
        assert found == Audit(llama(0), PROMPT, mine).difference([*mine[:position], (mine[position] + 1) % 90])
    assert calls == [9, 11]


def test_audit_judges_the_text_that_was_written() -> None:
    """Plain decoding of a batch may have gone another way than it goes alone."""
    model = llama(0)
    alone = plain(model, 12)[PROMPT.shape[1] :]
    written = [(alone[0] + 1) % 90, 5, 6]
    logits = model(torch.tensor([PROMPT[0].tolist() + written])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    found = Audit(model, PROMPT, [*written, first]).difference([*written, second, 1])
    assert found is not None and (found.position, found.plain_token, found.other_token) == (3, first, second)
    assert found.top_two and found.gap == pytest.approx((logits[first] - logits[second]).item(), abs=1e-3)


@pytest.mark.real_time
@pytest.mark.parametrize("replays", [False, True])
def test_forwards_that_are_replayed_are_metered(replays: bool) -> None:
    """Each with the tokens that it was asked for, and each step of a draft's window as one of a single token."""
    model, draft = models.llama(), models.llama(seed=1)
    drafter = DraftModelDrafter(draft, num_draft_tokens=4)
    call = {"max_new_tokens": 30, "do_sample": False, "speculation": {"forwards": "captured"}}
    with traced() if replays else nullcontext():
        for _ in range(2):  # what the first call records the second replays
            with metered(model, draft) as meter:
                model.generate(**models.prompts([9]), **call, assistant_model=drafter)
    stats = drafter.last_stats
    assert not stats.notes or "recorded" in stats.notes[0]
    steps = meter.of("target")
    assert len(steps) == stats.target_calls and {step.width for step in steps[1:]} <= {1, 2, 3, 4, 5}
    assert steps[0].context == 0 and all(step.context >= 9 for step in steps[1:])
    assert len(meter.of("draft")) == stats.draft_calls
    assert all(step.seconds > 0 for step in meter.forwards)
    assert sum(step.width - 1 for step in steps[1:]) == stats.drafted_tokens
