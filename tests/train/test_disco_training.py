"""Training DISCO: records are what decoding does, extraction can be interrupted, and bad data is refused."""

import json
import shlex

import pytest
import torch
from clocks import Clock
from disco_models import classifier, close_to, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec import Drafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier, Threshold
from hf_specdec.drafters.disco.session import Classified
from hf_specdec.tools.loading.models import Pair
from hf_specdec.tools.loading.prompts import Prompt
from hf_specdec.train import writing
from hf_specdec.train.disco import Quality, TrainSettings, answers, closing, fit, quality, records_of, run, train_disco
from hf_specdec.train.disco.records import Record, record_text
from hf_specdec.train.disco.run import TAUS, seconds_per_token

WORDS = [f"w{i}" for i in range(95)]
TEXTS = [" ".join(WORDS[i : i + 5]) for i in range(40)]
PROMPTS = [Prompt((text,)) for text in TEXTS]


@pytest.fixture(scope="module")
def target():
    return tiny(0, scale=25.0)


@pytest.fixture(scope="module")
def draft(target):
    return close_to(target, 1, 0.05)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1} | {w: i + 2 for i, w in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<s>", padding_side="left")


@pytest.fixture(scope="module")
def pair(target, draft, tokenizer):
    return Pair(tokenizer, target, draft)


@pytest.mark.parametrize("lookup", [False, True])
def test_records_say_what_decoding_sees(target, draft, lookup, monkeypatch):
    """Of every drafted token before and at the first rejection: its chance, and whether it is accepted."""
    made, told = classifier(sees_token=True), {}
    drafter = DiscoDrafter(draft, made, rule="token", tau=0.0, max_draft_tokens=6, lookup=lookup)
    begin, of, observe = Classified.begin, Classified.of, Threshold.observe
    seen: list[float] = []
    start = 0

    def beginning(self, sequences):
        nonlocal start
        start = sequences.lengths[0]
        seen.clear()
        begin(self, sequences)

    def saying(self, logits, tokens):
        chances = of(self, logits, tokens)
        seen.append(chances[0])
        return chances

    def observing(self, verdict, kept):
        for i, chance in enumerate(seen[: verdict.accepted[0] + 1]):
            told[start + i] = chance, i < verdict.accepted[0]
        observe(self, verdict, kept)

    monkeypatch.setattr(Classified, "begin", beginning)
    monkeypatch.setattr(Classified, "of", saying)
    monkeypatch.setattr(Threshold, "observe", observing)
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)  # drafting never pauses
    for first in range(3, 6):
        told.clear()
        prompt = torch.tensor([[first, 7, 9, 4]])
        text = target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)[0]
        record = record_text(target, draft, text, 4, k=4, do_sample=False, lookup=lookup)
        chances = made(record.features)[:, 0].sigmoid()
        assert len(told) > 20
        for column, (chance, accepted) in told.items():
            assert chance == pytest.approx(float(chances[column - 4]), abs=1e-4)
            assert accepted == bool(record.accepted[column - 4])


@torch.no_grad()
def test_sampled_records_draw_from_q_and_accept_with_the_chance_of_algorithm_1(target, draft):
    torch.manual_seed(1)
    text = target.generate(torch.tensor([[5, 7, 9, 4]] * 40), max_new_tokens=40, do_sample=True, top_k=0)
    records = [record_text(target, draft, row, 4, k=4, do_sample=True) for row in text]
    chance = torch.cat([r.chance for r in records])
    accepted = torch.cat([r.accepted for r in records]).float()
    deviation = (chance * (1 - chance)).mean().sqrt() / len(chance) ** 0.5
    assert abs(accepted.mean() - chance.mean()) < 5 * deviation
    assert chance.min() > 0 and chance.max() <= 1
    # Its mean over draws is 1 − TV(p, q), within five standard deviations, and their chance falls as it should.
    p, q = (model(text).logits[:, 3:-1].softmax(-1).flatten(0, 1) for model in (target, draft))
    assert abs(chance.mean() - torch.minimum(p, q).sum(-1).mean()) < 5 * chance.std() / len(chance) ** 0.5
    log_q, entropy = (torch.cat([r.features[:, i] for r in records]) for i in (-1, 4))
    assert abs(log_q.mean() + entropy.mean()) < 5 * (log_q + entropy).std() / len(chance) ** 0.5


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_interrupted_run_goes_on_to_the_same_records(pair, tmp_path, monkeypatch, do_sample):
    def seen(folder):
        return records_of(pair, answers(pair, PROMPTS, folder, do_sample, 24), k=4)

    whole, honest, calls = seen(tmp_path / "whole"), writing._continue, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(writing, "_continue", dies)
    with pytest.raises(KeyboardInterrupt):
        seen(tmp_path / "parts")
    resumed = seen(tmp_path / "parts")
    assert sum(bool(prompts) for _, _, prompts, *_ in calls) == 4, "three batches, one of them tried twice"
    assert len(resumed) == len(whole) == len(PROMPTS)
    for a, b in zip(resumed, whole, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("features", "chance", "accepted"))


def test_answers_of_something_else_are_not_taken(pair, tmp_path):
    answers(pair, PROMPTS[:2], tmp_path, False, 24)
    with pytest.raises(SpeculationError, match="seed"):
        answers(pair, PROMPTS[:2], tmp_path, False, 24, seed=1)
    with pytest.raises(SpeculationError, match="target"):
        answers(Pair(pair.tokenizer, pair.draft, None), PROMPTS[:2], tmp_path, False, 24)
    with pytest.raises(SpeculationError, match="no prompts"):
        answers(pair, [], tmp_path, False, 24)


def test_texts_that_end_at_once_are_a_clear_error(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", list(range(97)))
    with pytest.raises(SpeculationError, match="nothing to learn"):
        records_of(pair, answers(pair, PROMPTS[:3], tmp_path, False, 24), k=4)


def made_up(n: int, accepted: torch.Tensor | None = None, seed: int = 0) -> Record:
    """Acceptance that follows the top probability."""
    torch.manual_seed(seed)
    x = torch.rand(n, 10)
    chance = (x[:, 0] > 0.4).float() if accepted is None else accepted
    return Record(x, chance, chance.bool())


def test_a_classifier_learns_what_can_be_learned_and_the_same_one_every_time():
    records = {False: [made_up(2000)], True: [made_up(2000, seed=1)]}
    first, second = (fit(records, records, hidden=8, epochs=12, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    found = quality(first, [made_up(1000, seed=2)], do_sample=False)
    assert found.f1 > 0.95 > found.f1_always
    assert found.calibration_error < 0.1


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_is_refused(value):
    records = {False: [made_up(50, torch.full((50,), value))]}
    with pytest.raises(SpeculationError, match="only"):
        fit(records, records)
    with pytest.raises(SpeculationError, match="no records"):
        fit({False: []}, {False: []})


def test_the_command_makes_a_drafter_that_loads_and_keeps_the_text(target, draft, tokenizer, tmp_path):
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))
    settings = TrainSettings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        data=[str(tmp_path / "data.txt")],
        output=str(tmp_path / "out"),
        max_new_tokens=16,
        max_draft_tokens=6,
        timed_prompts=1,
        k=4,
        epochs=3,
        dtype="float32",
    )
    report = train_disco(settings)
    again = train_disco(settings)
    assert report["greedy"]["quality"] == again["greedy"]["quality"]
    assert json.loads((tmp_path / "out" / "training.json").read_text())["sampled"]["quality"]
    loaded = Drafter.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, DiscoDrafter) and isinstance(loaded.classifier, StopClassifier)
    assert loaded.config.rule == "budget" and loaded.config.max_draft_tokens == 6 and loaded.config.sees_token
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(plain, target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=loaded))
    timed = train_disco(TrainSettings(**vars(settings) | {"rule": "token"}))
    loaded = Drafter.from_pretrained(tmp_path / "out").config
    assert loaded.rule == "token"
    assert (loaded.tau, loaded.tau_sampled) == (timed["greedy"]["tau"], timed["sampled"]["tau"])
    for bad in ({"rule": "draft"}, {"timed_prompts": 0}, {"max_draft_tokens": 0}):
        with pytest.raises(SpeculationError, match=next(iter(bad))):
            train_disco(TrainSettings(**vars(settings) | bad))


def test_the_threshold_that_takes_least_time_is_found(target, pair, monkeypatch):
    """By a clock that only forwards move. The draft is always right, so the lowest τ, which drafts most, is best."""
    draft, clock, made = close_to(target, 1, 0.0), Clock(monkeypatch), classifier()
    drafters = {tau: DiscoDrafter(draft, made, rule="token", tau=tau, max_draft_tokens=8) for tau in TAUS}
    with clock.moved_by(target, lambda width: 1.0 + 0.02 * width), clock.moved_by(draft, lambda width: 0.1):
        seconds = seconds_per_token(pair, drafters, PROMPTS[:3], False, 24, 0)
    assert list(seconds) == list(TAUS)
    found = [round(each, 9) for each in seconds.values()]
    assert sorted(found) == found and seconds[TAUS[0]] < 0.4 < seconds[TAUS[-1]]


@pytest.fixture
def settings(target, draft, tokenizer, tmp_path):
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))
    return TrainSettings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        data=[str(tmp_path / "data.txt")],
        output=str(tmp_path / "the drafter"),
        max_new_tokens=8,
        max_draft_tokens=4,
        timed_prompts=1,
        k=4,
        epochs=1,
        dtype="float32",
    )


@pytest.mark.parametrize(("f1", "warned"), [(0.5, ["greedy", "sampled"]), (0.6, []), (0.7, [])])
def test_a_classifier_worse_than_always_accepting_is_warned_of(settings, monkeypatch, recwarn, f1, warned):
    monkeypatch.setattr(run, "quality", lambda *_: Quality(f1, 0.6, 0.1))
    report = train_disco(settings)
    said = [str(w.message) for w in recwarn if issubclass(w.category, SpeculationWarning)]
    assert [message.split(":")[0] for message in said] == warned
    assert all("below the 0.600 of always accepting" in message for message in said)
    *lines, command = closing(settings, report)
    assert f"F1 {f1:.3f}" in lines[0] and settings.output in lines[-1]
    wanted = ["hf-specdec", "generate", "--target", settings.target, "--drafter", settings.output]
    assert shlex.split(command)[:6] == wanted


def test_ctrl_c_says_how_to_go_on(settings, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_disco(settings)
    assert "run the same command again to continue" in capsys.readouterr().err
