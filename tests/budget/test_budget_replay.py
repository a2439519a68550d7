"""The budget's replay over recorded texts plays the engine's own rounds, on the same clock of set times."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import Clock
from laboratory import script

from hf_specdec import DraftModelDrafter, SpeculationError
from hf_specdec.budget import Experience
from hf_specdec.tools.loading.chat import batch
from hf_specdec.tools.loading.models import Pair, PairSettings

replay = script("budget_replay")
TEXTS = ["Question: Tom has 3 apples and buys 4.", "def add(a, b):\n", "Meaning: name[Aromi], food[Chinese]\nText:"] * 2
SLOPE, NEW = 0.05, 40


@pytest.fixture(scope="module")
def pair() -> Pair:
    return PairSettings(target="tests/pair/target", draft="tests/pair/draft", dtype="float32", device="cpu").load()


def knowing(c: float) -> Experience:
    """Of a draft model whose steps take c."""
    experience = Experience()
    experience.cost = replay.SetSteps(c)
    return experience


@pytest.mark.grid
@pytest.mark.parametrize("c", [0.05, 0.3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.eager  # its clock is moved by the models' own forwards
def test_replayed_rounds_are_the_engines_own(pair: Any, rows: int, c: float, monkeypatch: Any) -> None:
    """But for what is thought of behind wrong tokens, which is recorded of other places and not kept: by it the numbers
    of verified tokens differ a little, and rounds by one or two: texts are so long that those are few."""
    monkeypatch.setattr(replay, "OPENING", 0.0)
    prompts = [pair.tokenizer(text)["input_ids"] for text in TEXTS]
    texts = list(replay.record(pair, prompts, 2 * NEW))
    times = replay.SetTimes(SLOPE)
    calls, told = range(0, len(texts), rows), knowing(c)
    replayed = [replay.play(texts[i : i + rows], "auto", 3, told, times) for i in calls]

    drafter: Any = DraftModelDrafter(pair.draft, num_candidates=3)
    known = knowing(c)
    drafter._experience = SimpleNamespace(of=lambda *_: known)
    monkeypatch.setattr("hf_specdec.engine.generation._costs", SimpleNamespace(of=lambda *_: replay.SetTimes(SLOPE)))
    clock, taken = Clock(monkeypatch), 0.0
    with clock.moved_by(pair.target, lambda width: 1 + SLOPE * (width - 1)), clock.moved_by(pair.draft, lambda _: c):
        for i in calls:
            inputs = batch(prompts[i : i + rows], pair.tokenizer.pad_token_id, pair.target.device)
            pair.target.generate(**inputs, max_new_tokens=2 * NEW, do_sample=False, assistant_model=drafter)
            stats = drafter.last_stats
            rounds = sum(n * (1 + SLOPE * (width - 1)) for width, n in stats.verify_widths.items())
            taken += rounds + c * stats.draft_calls
    assert sum(replayed) == pytest.approx(taken, rel=0.03)


@pytest.mark.slow
def test_recorded_draws_are_kept_as_often_as_the_engines_own(pair: Any) -> None:
    """About 600 tested tokens on either side: a share that is off by 0.15 is seen nearly always."""
    prompts = [pair.tokenizer(text)["input_ids"] for text in TEXTS]
    texts = [text for seed in (0, 100, 200) for text in replay.record(pair, prompts, NEW, temperature=1.0, seed=seed)]
    recorded = [[tokens == [replay.RIGHT] for tokens in text.tokens] for text in texts]
    drafter, accepted, tested = DraftModelDrafter(pair.draft, num_draft_tokens=3), 0, 0
    for prompt in prompts * 3:
        inputs = batch([prompt], pair.tokenizer.pad_token_id, pair.target.device)
        pair.target.generate(**inputs, max_new_tokens=NEW, do_sample=True, top_k=0, assistant_model=drafter)
        stats = drafter.last_stats
        assert stats is not None
        accepted += sum(stats.accepted_per_position.values())
        tested += sum(stats.accepted_per_position.values()) + stats.rejections
    told, here = sum(map(len, recorded)), sum(map(sum, recorded))
    share = (accepted + here) / (tested + told)
    deviation = (share * (1 - share) * (1 / tested + 1 / told)) ** 0.5
    assert min(tested, told) > 400 and abs(accepted / tested - here / told) < 4 * deviation


def test_what_is_drawn_is_from_q_and_kept_where_the_target_draws_it() -> None:
    """20,000 places; a chance that is off by 0.02 is caught."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.4, 0.1, 0.3])
    torch.manual_seed(0)
    text = torch.multinomial(p, 20_001, replacement=True).tolist()
    drawn = replay.draw(text, p.expand(20_000, -1), q.expand(20_000, -1))
    right = torch.tensor(drawn.tokens)[:, 0] == replay.RIGHT
    kept = [((torch.tensor(text[1:]) == token) & right).float().mean().item() for token in range(4)]
    assert kept == pytest.approx(torch.minimum(p, q).tolist(), abs=0.02)
    said = torch.tensor(drawn.chances)[:, 0]
    assert [(said == chance).float().mean().item() for chance in q] == pytest.approx(q.tolist(), abs=0.02)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", ["auto", 1, 4])
def test_drawn_texts_are_replayed_by_the_sessions_themselves(window: Any, rows: int) -> None:
    """A draft that is never right costs the windows all that it takes; one that always is saves all that it can."""
    times = replay.SetTimes(SLOPE)
    taken = {}
    for token in (replay.RIGHT, replay.WRONG):
        texts = [replay.Recording([replay.RIGHT] * 60, [[token]] * 59, [[0.5]] * 59)] * rows
        taken[token] = replay.play(texts, window, 1, knowing(0.1), times, drawn=True)
    if window == "auto":
        assert taken[replay.RIGHT] < 59 / 3 and taken[replay.WRONG] < 1.06 * 59
    else:
        each = 1 + SLOPE * window + (window + replay.OPENING) * 0.1
        assert taken[replay.RIGHT] == pytest.approx(59 / (window + 1) * each, rel=0.1)
        assert taken[replay.WRONG] == pytest.approx(59 * each, rel=0.1)


def test_what_is_misjudged_takes_as_long_as_it_does(pair: Any) -> None:
    """A window that is set to a number does not mind what is believed."""
    texts = list(replay.record(pair, [pair.tokenizer(TEXTS[0])["input_ids"]], NEW))
    taken = []
    for believed in (1.0, 5.0):
        times = replay.SetTimes(SLOPE, believed)
        assert times.takes(5) == pytest.approx(1 + 4 * SLOPE)
        assert times.round(1)(5) == pytest.approx(1 + 4 * believed * SLOPE)
        taken.append(replay.play(texts, 3, 1, knowing(0.1), times))
    assert taken[0] == taken[1]


@pytest.mark.parametrize("wrong", [{"slope": [0.1]}, {"candidates": 5}, {"candidates": 0}])
def test_bad_settings_are_named(wrong: Any) -> None:
    settings = replay.ReplaySettings(target="", draft="", prompts=[], **wrong)
    with pytest.raises(SpeculationError, match=next(iter(wrong))):
        replay.main(settings)


def test_texts_are_recorded_once(pair: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS[:3]))
    settings = replay.ReplaySettings(target="", draft="", prompts=["prompts.txt"], rows=[1, 3], max_new_tokens=9)
    monkeypatch.setattr(settings, "load", lambda: pair)
    replay.main(settings)
    shown = capsys.readouterr().out
    assert "rows 3, slope 0.085, c = 0.12" in " ".join(shown.split()) and shown.count("budget") == 2
    monkeypatch.setattr(replay, "record", None)
    replay.main(settings)
    assert capsys.readouterr().out == shown
