"""The budget's replay over recorded texts plays the engine's own rounds, on the same clock of set times."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_stats import Clock

import budget_replay
from budget_replay import SetSteps, SetTimes, main, play, record
from hf_specdec import DraftModelDrafter, SpeculationError
from hf_specdec.budget import Survival
from hf_specdec.loading.chat import batch
from hf_specdec.loading.models import Pair, PairSettings

TEXTS = ["Question: Tom has 3 apples and buys 4.", "def add(a, b):\n", "Meaning: name[Aromi], food[Chinese]\nText:"] * 2
SLOPE, NEW = 0.05, 40


@pytest.fixture(scope="module")
def pair() -> Pair:
    return PairSettings(target="tests/pair/target", draft="tests/pair/draft", dtype="float32", device="cpu").load()


@pytest.mark.parametrize("c", [0.05, 0.3])
@pytest.mark.parametrize("rows", [1, 3])
def test_replayed_rounds_are_the_engines_own(pair: Any, rows: int, c: float, monkeypatch: Any) -> None:
    """But for what is thought of behind wrong tokens, which is recorded of other places and not kept: by it the numbers
    of verified tokens differ a little."""
    monkeypatch.setattr(budget_replay, "OPENING", 0.0)
    prompts = [pair.tokenizer(text)["input_ids"] for text in TEXTS]
    texts = list(record(pair, prompts, NEW))
    survival, times, steps = Survival(), SetTimes(SLOPE), SetSteps(c)
    calls = range(0, len(texts), rows)
    replayed = [play(texts[i : i + rows], pair.draft, "auto", 3, survival, times, steps) for i in calls]

    drafter: Any = DraftModelDrafter(pair.draft, num_candidates=3)
    known = SetSteps(c)
    drafter._costs = SimpleNamespace(of=lambda *_: known)
    monkeypatch.setattr("hf_specdec.decoding.loop._costs", SimpleNamespace(of=lambda *_: SetTimes(SLOPE)))
    clock, taken = Clock(monkeypatch), 0.0
    with clock.moved_by(pair.target, lambda width: 1 + SLOPE * (width - 1)), clock.moved_by(pair.draft, lambda _: c):
        for i in calls:
            inputs = batch(prompts[i : i + rows], pair.tokenizer.pad_token_id, pair.target.device)
            pair.target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
            stats = drafter.last_stats
            rounds = sum(n * (1 + SLOPE * (width - 1)) for width, n in stats.verify_widths.items())
            taken += rounds + c * stats.draft_calls
    assert sum(replayed) == pytest.approx(taken, rel=0.03)


def test_what_is_misjudged_takes_as_long_as_it_does(pair: Any) -> None:
    """A window that is set to a number does not mind what is believed."""
    texts = list(record(pair, [pair.tokenizer(TEXTS[0])["input_ids"]], NEW))
    taken = []
    for believed in (1.0, 5.0):
        times = SetTimes(SLOPE, believed)
        assert times.takes(5) == pytest.approx(1 + 4 * SLOPE)
        assert times.round(1)(5) == pytest.approx(1 + 4 * believed * SLOPE)
        taken.append(play(texts, pair.draft, 3, 1, Survival(), times, SetSteps(0.1, always=True)))
    assert taken[0] == taken[1]


@pytest.mark.parametrize("wrong", [{"slope": [0.1]}, {"candidates": 5}, {"candidates": 0}])
def test_bad_settings_are_named(wrong: Any) -> None:
    settings = budget_replay.ReplaySettings(target="", draft="", prompts=[], **wrong)
    with pytest.raises(SpeculationError, match=next(iter(wrong))):
        main(settings)


def test_texts_are_recorded_once(pair: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS[:3]))
    settings = budget_replay.ReplaySettings(target="", draft="", prompts=["prompts.txt"], rows=[1, 3], max_new_tokens=9)
    monkeypatch.setattr(settings, "load", lambda: pair)
    main(settings)
    shown = capsys.readouterr().out
    assert "rows 3, slope 0.085, c = 0.12" in " ".join(shown.split()) and shown.count("budget") == 2
    monkeypatch.setattr(budget_replay, "record", None)
    main(settings)
    assert capsys.readouterr().out == shown
