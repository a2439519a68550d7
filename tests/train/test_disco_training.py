"""Training DISCO: records are what decoding does, extraction can be interrupted, and bad data is refused."""

import json
import shlex

import pytest
import torch
from test_disco import STOPS, classifier, close_to, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from disco_oracle import oracle_report, oracle_rounds, plot_oracle
from hf_specdec import Drafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier, StopRule
from hf_specdec.tools.loading.prompts import Prompt
from hf_specdec.train.disco import (
    Quality,
    Regime,
    TrainSettings,
    closing,
    extract,
    extraction,
    fit,
    quality,
    run,
    train_disco,
)
from hf_specdec.train.disco.extraction import load
from hf_specdec.train.disco.records import Record, record_text
from hf_specdec.train.disco.simulation import Costs, Round, Values, play
from hf_specdec.train.disco.tuning import chances, simulated_choices

COSTS = Costs(0.2, lambda width: 1.0 + 0.02 * width)
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


def regime(do_sample: bool = False, **changes) -> Regime:
    return Regime(**{"do_sample": do_sample, "max_new_tokens": 24, "k": 4, "rollout": 7, "seed": 0} | changes)


@pytest.mark.parametrize("whole_draft", [False, True])
@pytest.mark.parametrize("tau", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("lookup", [False, True])
def test_rounds_played_over_a_record_are_those_that_decoding_makes(target, draft, whole_draft, tau, lookup):
    made = classifier(STOPS)
    rule = "draft" if whole_draft else "token"
    drafter = DiscoDrafter(draft, made, tau=tau, rule=rule, max_draft_tokens=6, lookup=lookup)
    for first in range(3, 9):
        prompt = torch.tensor([[first, 7, 9, 4]])
        text = target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)[0]
        record = record_text(target, draft, text, 4, k=4, do_sample=False, rollout=5, lookup=lookup)
        (values,) = chances(made, [record], do_sample=False)
        rounds = play(values, StopRule(tau, whole_draft), longest=6)
        stats = drafter.last_stats
        assert stats.row_steps == len(rounds)
        for i in range(6):
            assert stats.drafted_per_position[i] == sum(r.drafted > i for r in rounds)
            assert stats.accepted_per_position[i] == sum(r.accepted > i for r in rounds)


@torch.no_grad()
def test_sampled_records_accept_at_the_rate_beta(target, draft):
    torch.manual_seed(1)
    text = target.generate(torch.tensor([[5, 7, 9, 4]] * 40), max_new_tokens=40, do_sample=True, top_k=0)
    records = [record_text(target, draft, row, 4, k=4, do_sample=True) for row in text]
    beta = torch.cat([r.beta for r in records])
    accepted = torch.cat([r.accepted for r in records]).float()
    deviation = (beta * (1 - beta)).mean().sqrt() / len(beta) ** 0.5
    assert abs(accepted.mean() - beta.mean()) < 5 * deviation
    assert beta.min() > 0 and beta.max() <= 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_interrupted_extraction_goes_on_to_the_same_records(
    target, draft, tokenizer, tmp_path, monkeypatch, do_sample
):
    whole = extract(target, draft, tokenizer, PROMPTS, regime(do_sample), tmp_path / "whole")
    honest, calls = extraction._save, []

    def dies(records, path):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        honest(records, path)

    monkeypatch.setattr(extraction, "_save", dies)
    with pytest.raises(KeyboardInterrupt):
        extract(target, draft, tokenizer, PROMPTS, regime(do_sample), tmp_path / "parts")
    assert 0 < len(list(load(tmp_path / "parts"))) < len(PROMPTS)
    resumed = extract(target, draft, tokenizer, PROMPTS, regime(do_sample), tmp_path / "parts")
    assert len(calls) == 4, "three shards, one of them tried twice"
    assert len(resumed) == len(whole) == len(PROMPTS)
    for a, b in zip(resumed, whole, strict=True):
        assert all(
            torch.equal(getattr(a, name), getattr(b, name)) for name in ("features", "beta", "accepted", "after")
        )


def test_records_of_something_else_are_not_taken(target, draft, tokenizer, tmp_path):
    extract(target, draft, tokenizer, PROMPTS[:2], regime(), tmp_path)
    with pytest.raises(SpeculationError, match="seed"):
        extract(target, draft, tokenizer, PROMPTS[:2], regime(seed=1), tmp_path)
    with pytest.raises(SpeculationError, match="draft"):
        extract(target, target, tokenizer, PROMPTS[:2], regime(), tmp_path)
    with pytest.raises(SpeculationError, match="no prompts"):
        extract(target, draft, tokenizer, [], regime(), tmp_path)


def test_texts_that_end_at_once_are_a_clear_error(target, draft, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(target.generation_config, "eos_token_id", list(range(97)))
    with pytest.raises(SpeculationError, match="nothing to learn"):
        extract(target, draft, tokenizer, PROMPTS[:3], regime(), tmp_path)


def made_up(n: int, accepted: torch.Tensor | None = None, seed: int = 0) -> Record:
    """Acceptance that follows the top probability."""
    torch.manual_seed(seed)
    x = torch.rand(n, 8)
    beta = (x[:, 0] > 0.4).float() if accepted is None else accepted
    return Record(x, beta, beta.bool(), torch.rand(n, 5, 8))


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


def test_the_chosen_rule_is_the_fastest_of_all_and_the_oracle_is_faster():
    torch.manual_seed(0)
    values = [Values(torch.rand(60).tolist(), torch.rand(60, 15).tolist(), (torch.rand(60) < 0.8).tolist())] * 3
    ranked = simulated_choices(values, COSTS, ["token", "draft"])
    assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)
    report = oracle_report(values, COSTS)
    assert report.seconds < ranked[0].seconds < report.plain_seconds
    assert all(r.drafted == r.accepted for value in values for r in oracle_rounds(value))
    assert report.seconds <= sum(COSTS.seconds(oracle_rounds(value)) for value in values) + 1e-9
    dear = Costs(2.0, lambda width: 1.0)
    assert oracle_report(values, dear).seconds == pytest.approx(oracle_report(values, dear).plain_seconds)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_texts_shorter_than_a_window(n):
    values = Values([1.0] * n, [[1.0] * 7] * n, [True] * n)
    for longest in (1, 8):
        rounds = play(values, StopRule(0.0, True), longest)
        assert sum(r.accepted + 1 for r in rounds) == max(0, n - 1)
        assert rounds == oracle_rounds(values) or longest == 1


def test_every_token_is_emitted_once_whatever_the_rule():
    torch.manual_seed(1)
    values = Values(torch.rand(50).tolist(), torch.rand(50, 7).tolist(), (torch.rand(50) < 0.7).tolist())
    for tau in (0.0, 0.2, 0.5, 0.9, 1.0):
        rounds = play(values, StopRule(tau, False), 8)
        assert sum(r.accepted + 1 for r in rounds) == 49
        assert all(0 <= r.accepted <= r.drafted <= 8 for r in rounds)
    assert COSTS.seconds([Round(2, 1)]) == pytest.approx(2 * 0.2 + 1.06)


def test_a_rule_may_draft_nothing():
    class Wary(StopRule):
        rounds = 0

        def begins(self):
            self.rounds += 1
            return self.rounds % 2 == 0

    values = Values([1.0] * 20, [[1.0] * 3] * 20, [True] * 20)
    rounds = play(values, Wary(0.0, False), 3)
    assert [r.drafted for r in rounds[:6]] == [0, 3, 0, 3, 0, 3]
    assert sum(r.accepted + 1 for r in rounds) == 19


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
        longest=6,
        timed_prompts=1,
        k=4,
        epochs=3,
        dtype="float32",
    )
    report = train_disco(settings)
    again = train_disco(settings)
    assert report["greedy"]["quality"] == again["greedy"]["quality"]
    assert json.loads((tmp_path / "out" / "training.json").read_text())["sampled"]["choices"]
    loaded = Drafter.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, DiscoDrafter) and isinstance(loaded.classifier, StopClassifier)
    assert loaded.config.rule == "budget" and loaded.config.tau == again["greedy"]["choices"][0]["tau"]
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(plain, target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=loaded))
    train_disco(TrainSettings(**vars(settings) | {"rules": ["token"]}))
    assert Drafter.from_pretrained(tmp_path / "out").config.rule == "token"
    for rules in (["never"], [], ["budget", "token"]):
        with pytest.raises(SpeculationError, match="rules"):
            train_disco(TrainSettings(**vars(settings) | {"rules": rules}))


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    values = [Values([1.0] * 30, [[1.0]] * 30, [i % 4 > 0 for i in range(30)])] * 2
    assert all(path.stat().st_size > 1000 for path in plot_oracle(values, "toy", 3, tmp_path))


PACES = {"pace_target": 10.0, "pace_draft": 5.0}


@pytest.mark.real_time  # of paces
@pytest.mark.parametrize(
    ("costs", "options", "heading"),
    [
        ("measured", {"pad_draft_mlp": 300}, "trained on data, the draft's MLPs cost-padded to 300"),
        pytest.param(
            *("paced", PACES, "trained on data, the target paced at 10 ms, the draft paced at 5 ms"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_table_compares_all_rules_and_none_beats_the_oracle(
    target, draft, tokenizer, tmp_path, capsys, costs, options, heading
):
    from disco_table import main

    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))
    models = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    data = {"train": tmp_path / "data.txt", "test": [tmp_path / "data.txt"], "output": tmp_path / "out"}
    main(**models, **data, **options, limit=8, timed=1, max_new_tokens=8, dtype="float32", threads=1)
    (path,) = (tmp_path / "out").glob("table-*.json")
    summary = json.loads(path.read_text())
    assert summary["costs"] == costs and path.name.startswith(f"table-{costs}-")
    (written,) = path.with_suffix(".md").read_text().splitlines()[:1]
    assert written.endswith(heading) and capsys.readouterr().out.startswith(written)
    if options == PACES:
        assert summary["draft_seconds"] >= PACES["pace_draft"] / 1000
        assert min(summary["target_seconds"].values()) >= PACES["pace_target"] / 1000
    results = summary["results"]
    assert [result["sampled"] for result in results] == [False, True]
    for result in results:
        lines = {line["method"]: line for line in result["lines"]}
        assert {"plain", "static optimal", "perplexity", "DISCO, draft rule", "oracle"} <= set(lines)
        assert all(line["of_oracle"] <= 1 + 1e-9 for line in lines.values())
        assert lines["transformers confidence"]["measured_speedup"] > 0
        static = [line for line in lines.values() if line["method"].startswith("static")]
        assert len(static) == 3 and max(line["of_static"] for line in static) == 1
        best = max(line["measured_speedup"] for line in static)
        for line in lines.values():
            if line["measured_speedup"] is not None:
                assert line["of_static"] == pytest.approx(line["measured_speedup"] / best)


OPTIONS = {"pad_target_mlp": 300, "pad_draft_mlp": 300, "pace_target": 10.0, "pace_draft": 5.0, "timed": 0}


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
        longest=4,
        timed_prompts=0,
        k=4,
        epochs=1,
        dtype="float32",
    )


@pytest.mark.parametrize(("f1", "warned"), [(0.5, ["greedy", "sampled"]), (0.6, []), (0.7, [])])
def test_a_classifier_worse_than_always_accepting_is_warned_of(settings, monkeypatch, recwarn, f1, warned):
    monkeypatch.setattr(run, "quality", lambda *_: Quality(f1, 0.6, 0.1, [], 5))
    report = train_disco(settings)
    said = [str(w.message) for w in recwarn if issubclass(w.category, SpeculationWarning)]
    assert [message.split(":")[0] for message in said] == warned
    assert all("below the 0.600 of always accepting" in message for message in said)
    *lines, command = closing(settings, report)
    assert "F1" in lines[0] and settings.output in lines[-1]
    wanted = ["hf-specdec", "generate", "--target", settings.target, "--drafter", settings.output]
    assert shlex.split(command)[:6] == wanted


def test_ctrl_c_says_how_to_go_on(settings, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_disco(settings)
    assert "run the same command again to continue" in capsys.readouterr().err


@pytest.mark.parametrize("name", OPTIONS)
def test_a_table_of_stated_costs_refuses_what_it_would_ignore(tmp_path, name):
    from disco_table import main

    data = {"target": "t", "draft": "d", "train": tmp_path / "x", "test": [tmp_path / "x"], "output": tmp_path / "out"}
    with pytest.raises(SpeculationError, match=f"drop {name}={OPTIONS[name]}$"):
        main(**data, c=[0.1], **{name: OPTIONS[name]})
    assert list(tmp_path.iterdir()) == []
