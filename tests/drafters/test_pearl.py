"""PEARL gives plain decoding's text and the target's distribution, whatever overlaps."""

import numpy as np
import pytest
import torch
from models import VOCAB, llama
from pearl_pairs import DRAFTS, TARGET, generate, pearl, second_best, workers_in_threads
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from hf_specdec import SpeculationError
from hf_specdec.drafters.pearl import PearlDrafter, PearlSession, Timeline
from hf_specdec.drafters.pearl.schedule import PearlSchedule
from hf_specdec.drafters.pearl.worker import drafting
from hf_specdec.drafters.pearl.worker.drafting import BackgroundDraft
from hf_specdec.verify.judging import Judge
from hf_specdec.verify.randomness import Purpose, Randomness


@pytest.fixture(autouse=True)
def no_warnings(recwarn):
    yield
    assert [str(w.message) for w in recwarn if "was dropped" in str(w.message)] == []
    assert not workers_in_threads()


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("lengths", [(7,), (1,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 7, 8, "auto"])
def test_greedy_text_is_plain_decodings(window, lengths, draft):
    assert torch.equal(generate(pearl(DRAFTS[draft], window=window), lengths), generate(None, lengths))


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("corrections", [0, 3])
def test_drafting_for_corrections_changes_no_greedy_text(corrections, window, lengths, draft):
    drafter = pearl(DRAFTS[draft], window=window, corrections=corrections)
    assert torch.equal(generate(drafter, lengths), generate(None, lengths))


@pytest.mark.parametrize("pre_verify", [True, False])
@pytest.mark.parametrize("post_verify", [True, False])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("window", [1, 4])
def test_each_strategy_can_be_switched_off(window, lengths, pre_verify, post_verify):
    drafter = pearl(DRAFTS["good"], window=window, pre_verify=pre_verify, post_verify=post_verify)
    assert torch.equal(generate(drafter, lengths), generate(None, lengths))


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("at", range(1, 14))
def test_an_end_of_text_anywhere_in_a_round_ends_the_row(at, lengths):
    plain = generate(None, lengths)
    end = {"eos_token_id": int(plain[-1, max(lengths) + at])}
    assert torch.equal(generate(pearl(DRAFTS["good"], window=4), lengths, **end), generate(None, lengths, **end))


@pytest.mark.parametrize("new", range(1, 14))
def test_a_length_anywhere_in_a_round_ends_the_call(new):
    options = {"max_new_tokens": new, "lengths": (5, 9)}
    assert torch.equal(generate(pearl(DRAFTS["good"], window=4), **options), generate(None, **options))


@pytest.mark.parametrize("corrections", [0, 2])
@pytest.mark.parametrize("context", range(14, 20))
def test_the_text_may_grow_beyond_the_drafts_context(context, corrections):
    small = llama(seed=1, max_position_embeddings=context)
    small.load_state_dict(DRAFTS["middling"].state_dict())
    drafter = pearl(small, window=4, corrections=corrections)
    assert torch.equal(generate(drafter), generate(None)) and drafter.last_stats.draft_calls >= context - 7 - 4


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
def test_processors_see_plain_decodings_prefixes(changes, lengths):
    options = changes | {"eos_token_id": 5}
    drafter = pearl(DRAFTS["good"], window=3)
    assert torch.equal(generate(drafter, lengths, **options), generate(None, lengths, **options))


class Recorder(LogitsProcessor):
    """A user's processor that keeps state and forbids what it saw last."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
def test_a_users_processor_is_called_as_in_plain_decoding(lengths):
    calls = []
    for drafter in (None, pearl(DRAFTS["good"], window=3)):
        recorder = Recorder()
        text = generate(drafter, lengths, logits_processor=LogitsProcessorList([recorder]), eos_token_id=5)
        calls.append((text.tolist(), recorder.seen))
    assert calls[0] == calls[1]


def test_a_streamer_gets_every_token_once():
    class Tokens(TextStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got += value.flatten().tolist()

        def end(self):
            self.got.append("end")

    streams = []
    for drafter in (None, pearl(DRAFTS["good"], window=4)):
        stream = Tokens()
        generate(drafter, streamer=stream)
        streams.append(stream.got)
    assert streams[0] == streams[1]


def test_a_kept_cache_and_scores_are_plain_decodings():
    options = {"return_dict_in_generate": True, "output_scores": True}
    ours, plain = generate(pearl(DRAFTS["good"], window=4), **options), generate(None, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-3, rtol=1e-3)
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("draft", ["good", "middling"])
def test_a_seeded_text_depends_on_no_fixed_window_no_timing_and_no_correction_foreseen(draft, lengths):
    texts = []
    for window in (1, 2, 4, 8):  # "auto" may run serially for a while, where bonus tokens are drawn from p itself
        for corrections in (0, 1, 3):
            torch.manual_seed(5)
            drafter = pearl(DRAFTS[draft], window=window, corrections=corrections)
            texts.append(generate(drafter, lengths, do_sample=True))
    assert all(torch.equal(text, texts[0]) for text in texts)


# ---------------------------------------------------------------------- the distribution

TINY = 3
NEW = 5


def _tiny(seed, scale):
    model = llama(vocab=TINY, seed=seed, bos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


P, Q = _tiny(2, 0.4), _tiny(5, 0.4)
PROMPT = torch.tensor([[1, 2, 0]])


def expected(top_k=None):
    """The probability of each of the TINY ** NEW continuations."""
    total = torch.ones(1)
    prefixes = PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            logits = P(prefixes).logits[:, -1]
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        total = (total[:, None] * logits.softmax(-1)).flatten()
        prefixes = torch.cat(
            [prefixes.repeat_interleave(TINY, 0), torch.arange(TINY).repeat(len(prefixes))[:, None]], 1
        )
    return total.double()


def chi_square(options, rows=1000, calls=4):
    """Pearson's statistic of the continuations' frequencies, as a distance from its mean in standard deviations."""
    options = dict(options)
    top_k = options.pop("top_k", None)
    p = expected(top_k)
    counts = torch.zeros_like(p)
    powers = TINY ** torch.arange(NEW - 1, -1, -1)
    for seed in range(calls):
        torch.manual_seed(seed)
        drafter = pearl(Q, **options)
        ids = PROMPT.expand(rows, -1)
        out = P.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=NEW,
            top_k=top_k or 0,
            pad_token_id=0,
            eos_token_id=None,
        )
        counts += torch.bincount((out[:, 3:] * powers).sum(1), minlength=len(p))
    wanted = p * rows * calls
    assert counts[wanted == 0].sum() == 0
    rare = wanted < 5
    got = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None].clamp_min(1e-9)])
    freedom = len(got) - 1
    statistic = ((got - wanted) ** 2 / wanted).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


JOINT = [{"window": window, "corrections": n} for window, n in [(2, 1), (1, 1), (2, 0), (3, 2), (8, 1)]]
JOINT += [{"window": 2, "pre_verify": False}, {"window": 2, "post_verify": False}, {"window": 3, "top_k": 2}]
JOINT += [{"window": 2, "likely": 2}, {"window": 3, "likely": 1, "corrections": 0}]


@pytest.mark.grid
@pytest.mark.parametrize("options", JOINT, ids=str)
def test_the_joint_distribution_is_the_targets(options, monkeypatch):
    """In either strategy or both, behind a processor, and where not all tokens can be drafted."""
    monkeypatch.setattr(drafting, "LIKELY", options.get("likely", TINY))
    assert chi_square({name: value for name, value in options.items() if name != "likely"}) < 4


def test_a_draw_shared_by_two_tokens_is_caught(monkeypatch):
    def shared(self, rows, positions, purpose, attempt=0):
        if purpose == Purpose.ACCEPT and np.ndim(attempt) == 0:
            positions = [position // 2 for position in positions]
        return uniform(self, rows, positions, purpose, attempt)

    uniform = Randomness.uniform
    monkeypatch.setattr(Randomness, "uniform", shared)
    assert chi_square({"window": 2}, calls=2) > 8


def test_testing_the_first_token_twice_is_caught(monkeypatch):
    def verify(self, trial):
        """x1 of a pre-verified row has to pass a second test."""
        draft, logits = trial.draft, trial.forward.logits
        again = torch.rand(len(draft.lengths)).tolist()
        scores = torch.log_softmax(logits[:, 0].float(), -1)
        for b, (length, r) in enumerate(zip(draft.lengths, again, strict=True)):
            if length == 1 and r * float(draft.token_probs[b, 0]) >= float(scores[b, draft.tokens[b, 0]].exp()):
                draft.token_probs[b, 0] = 1e4 * draft.token_probs[b, 0]  # never passes
        return original(self, trial)

    original = Judge.verify
    monkeypatch.setattr(Judge, "verify", verify)
    monkeypatch.setattr("hf_specdec.verify.judging.is_sound", lambda draft, vocab: torch.tensor(True))
    assert chi_square({"window": 2}, calls=2) > 8


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("new", [6, 24])
@pytest.mark.parametrize("options", [{}, {"pre_verify": False}, {"post_verify": False}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_corrections_know_the_q_that_was_sampled_from(window, rows, options, new, monkeypatch):
    draft, checked = DRAFTS["middling"], []

    def verify(self, trial):
        results, proposal, sequences = verify_of(self, trial), trial.draft, trial.sequences
        for b, length in enumerate(proposal.lengths):
            for node in range(length):
                prefix = torch.cat([sequences.ids[b, : sequences.lengths[b]], proposal.tokens[b, :node]])[None]
                logits = draft(prefix).logits[0, -1]
                q = logits.masked_fill(logits < logits.topk(8).values[-1], -torch.inf).softmax(-1)
                torch.testing.assert_close(proposal.q[b, node], q, atol=1e-4, rtol=1e-3)
                checked.append(b)
        return results

    verify_of = Judge.verify
    monkeypatch.setattr(Judge, "verify", verify)
    monkeypatch.setattr(drafting, "LIKELY", 8)
    torch.manual_seed(0)
    generate(pearl(window=window, **options), (7,) * rows, do_sample=True, top_k=0, max_new_tokens=new)
    assert checked


# ---------------------------------------------------------------------- the schedule, the window, the timeline


def test_a_perfect_draft_is_never_rejected_and_saves_target_calls():
    drafter = pearl(TARGET, window=4)
    assert torch.equal(generate(drafter, max_new_tokens=33), generate(None, max_new_tokens=33))
    # The prefill gives 1 token, pre-verify 1, every round of post-verify 4.
    assert drafter.last_stats.target_calls == 1 + 1 + -(-31 // 4)
    assert drafter.last_stats.rejections == 0


@pytest.mark.parametrize("window", [1, 3])
def test_accepted_tokens_in_a_row_are_not_bounded_by_the_window(window):
    """Table 4: a rejection ends the run, the window does not."""
    drafter, runs = pearl(DRAFTS["good"], window=window), [0]
    observe = PearlSession.observe

    def watched(session, verdict):
        runs[-1] += sum(verdict.accepted)
        if sum(verdict.accepted) < sum(verdict.drafted):
            runs.append(0)
        observe(session, verdict)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PearlSession, "observe", watched)
        generate(drafter, max_new_tokens=192)
    line = drafter.last_timeline
    assert line.mean_accepted_run() == sum(runs) / (len(runs) - 1) > window
    assert f"; {line.mean_accepted_run():.1f} draft tokens accepted in a row" in line.text()
    assert Timeline().mean_accepted_run() is None and "in a row" not in Timeline().text()


def test_the_worker_remembers_what_is_not_verified_only(monkeypatch):
    held, follow = [], BackgroundDraft.follow

    def spy(draft, order):
        steps = follow(draft, order)
        held.extend(len(text.drafted) for text in draft.texts)
        assert max(held) <= 2 * order.width + 1
        return steps

    monkeypatch.setattr(BackgroundDraft, "follow", spy)
    generate(pearl(DRAFTS["good"], window=3, corrections=2), do_sample=True, max_new_tokens=48)
    assert any(held)


@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
def test_every_correction_may_be_foreseen(lengths, window):
    """Every test fails, and its correction has been drafted for. Only the last token's has no room for a draft."""
    drafter = pearl(second_best(TARGET), window=window, corrections=1)
    options = {"max_new_tokens": 12}
    assert torch.equal(generate(drafter, lengths, **options), generate(None, lengths, **options))
    made, foreseen = map(sum, zip(*drafter.last_timeline.corrections, strict=True))
    assert made >= 9 * len(lengths) and foreseen >= made - len(lengths)


def test_a_correction_foreseen_saves_target_calls():
    calls = []
    for corrections in (0, 1):
        drafter = pearl(window=4, corrections=corrections)
        generate(drafter, max_new_tokens=96)
        calls.append(drafter.last_stats.target_calls)
        assert bool(sum(hits for _, hits in drafter.last_timeline.corrections)) == bool(corrections)
    assert calls[1] < calls[0]


def test_a_timeline_is_recorded_and_shown():
    drafter = pearl(window=3)
    generate(drafter)
    line = drafter.last_timeline
    assert len(line.target) == len(line.tests) == drafter.last_stats.target_calls - 1
    assert 0 < line.utilisation()["target"] <= 1
    assert "target" in line.text() and Timeline().text()


@pytest.mark.parametrize(
    "options",
    [{"window": 0}, {"window": "big"}, {"worker": "gpu"}, {"gamma": 3}, {"corrections": 9}, {"corrections": "all"}],
    ids=str,
)
def test_bad_options_are_refused(options):
    with pytest.raises(SpeculationError, match=next(iter(options))):
        PearlDrafter(TARGET, **options)


def test_the_schedule_is_the_drafters():
    drafter, made = pearl(), []
    own = drafter.schedule
    drafter.schedule = lambda session, context: made.append(own(session, context)) or made[-1]
    generate(drafter)
    assert [type(schedule) for schedule in made] == [PearlSchedule] and TARGET.config.vocab_size == VOCAB


@pytest.mark.parametrize("window", [1, 2, 4])
def test_in_lockstep_a_row_that_has_ended_holds_nobody_up(window: int) -> None:
    """Nor does it make the texts of a worker that wants equal ones uneven."""
    plain = generate(None, (8, 3), max_new_tokens=21)
    for end in plain[0, 8:20:3].tolist():
        call = {"max_new_tokens": 21, "return_dict_in_generate": True, "output_scores": True, "eos_token_id": [end]}
        drafter = pearl(DRAFTS["good"], window=window, corrections=0)
        ours = generate(drafter, (8, 3), **call)
        assert torch.equal(ours.sequences, generate(None, (8, 3), **call).sequences)
        assert not any("dropped" in note for note in drafter.last_stats.notes)
