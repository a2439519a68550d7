"""`tune` finds what an exhaustive sweep finds, for a fraction of the forwards, and says where nothing is found."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import Clock, forget

from hf_specdec import Drafter, SpeculationError
from hf_specdec.tools.bench.decoding import decode
from hf_specdec.tools.bench.methods import PLAIN, Method, build_method
from hf_specdec.tools.instruments.forwards import wrapped_forward
from hf_specdec.tools.loading.chat import batch
from hf_specdec.tools.loading.models import Pair, PairSettings
from hf_specdec.tools.tune.recorded import Stage, record
from hf_specdec.tools.tune.run import ALONE, COPIES, DRAFTS, TuneSettings, run_tune, search

pytestmark = [pytest.mark.set_times, pytest.mark.eager]
PAIR = Path(__file__).parents[1] / "pair"
TEXTS = [
    "def add(a, b):\n",
    "Question: Tom has 3 apples and buys 4.",
    "for i in range(10):\n    print(i)\nfor i in",
    "Meaning: name[Aromi], food[Chinese]\nText:",
]
NEW = 48
COSTS = {
    "a GPU: wide forwards are cheap": (0.01, 0.1),
    "a CPU, and a slow draft model": (0.1, 0.4),
    "every token costs": (0.8, 0.8),
}
"""further time of a target's forward per token of a row, and c, the time of a draft step, both in target steps"""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return PairSettings(
        target=str(PAIR / "target"), draft=str(PAIR / "draft"), dtype="float32", device="cpu", threads=1
    ).load()


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., TuneSettings]:
    def made(**changes: Any) -> TuneSettings:
        source = tmp_path / "prompts.jsonl"
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
        told = {"target": "pair", "draft": "draft", "dtype": "float32", "max_new_tokens": NEW}
        return TuneSettings(**told | {"prompts": [str(source)], "output": tmp_path / "tuned"} | changes)

    return made


@contextmanager
def pretended(pair: Any, costs: tuple[float, float], monkeypatch: Any) -> Iterator[tuple[Clock, list[int]]]:
    """The clock of these costs, and a count of the target's forwards."""
    (slope, c), clock, count = costs, Clock(monkeypatch), [0]

    def counted(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return forward(*args, **kwargs)

    with (
        wrapped_forward(pair.target, counted),
        clock.moved_by(pair.target, lambda width: 1 + slope * (width - 1)),
        clock.moved_by(pair.draft, lambda width: c * (1 + slope * (width - 1))),
    ):
        yield clock, count


def seconds_of(pair: Any, method: Method, texts: Sequence[str] = TEXTS) -> float:
    """By the clock."""
    pad, total = pair.tokenizer.pad_token_id, 0.0
    for text in texts:
        inputs = batch([pair.tokenizer(text)["input_ids"]], pad)
        made = decode(pair.target, method, inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=pad)
        total += made.meter.seconds
    return total


@pytest.mark.grid
@pytest.mark.parametrize("cost", list(COSTS))
def test_it_finds_what_a_sweep_finds_in_a_quarter_of_its_forwards(pair, settings, cost, monkeypatch) -> None:
    choices, prompts = [*COPIES, *DRAFTS], [pair.tokenizer(text)["input_ids"] for text in TEXTS]
    with pretended(pair, COSTS[cost], monkeypatch) as (_, count):
        found, _ = search(pair, prompts, choices, settings())
        mine, count[0] = count[0], 0
        plain = seconds_of(pair, Method(PLAIN))
        swept = {spec: plain / seconds_of(pair, build_method(spec, pair.draft)) for spec in choices}
    assert mine < count[0] / 4
    chosen = swept[found[0].spec] if found[0].measured > 1 else 1.0
    assert chosen > 0.95 * max(1.0, *swept.values()), (found[:5], swept)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("spec", "alone"),
    [
        *((spec, False) for spec in (COPIES[0], "suffix", "draft_model:num_draft_tokens=3", "draft_model", "hybrid")),
        ("hybrid", True),
    ],
)
def test_what_is_replayed_takes_what_it_takes(pair, spec, alone, monkeypatch) -> None:
    """But for what the hybrid remembers of wrong tokens, behind which a recording says something else."""
    draft = None if alone else pair.draft
    prompts = [pair.tokenizer(text)["input_ids"] for text in TEXTS]
    forget()
    with pretended(pair, (0.05, 0.2), monkeypatch):
        stage = Stage(pair, [record(pair, ids, NEW) for ids in prompts])
        replayed = stage.play(build_method(spec, None if alone else stage.draft).drafter)
        seconds_of(pair, build_method("prompt_lookup", draft), TEXTS[:1])  # as on the stage
        taken = seconds_of(pair, build_method(spec, draft))
    assert replayed == pytest.approx(taken, rel=0.12 if spec == "hybrid" else 0.03)


def test_the_winners_folder_is_a_drafter_with_its_evidence(pair, settings, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(TuneSettings, "load", lambda _: pair)
    choices = ["prompt_lookup", "draft_model:num_draft_tokens=4", "draft_model:num_draft_tokens=1", "hybrid"]
    with pretended(pair, (0.01, 0.05), monkeypatch):
        found = run_tune(settings(drafters=choices))
    assert {one.spec for one in found} == set(choices) and found[0].measured == max(
        one.measured for one in found if one.measured is not None
    )
    assert [one.measured is None for one in found] == [False] * 3 + [True]
    folder = tmp_path / "tuned"
    drafter = Drafter.from_pretrained(str(folder))
    name, _, options = found[0].spec.partition(":")
    assert drafter.config.drafter_type == name
    assert all(f"{key}={value}" in options for key, value in drafter.config.chosen().items() if f"{key}=" in options)
    card, told = (folder / "README.md").read_text(), json.loads((folder / "tune.json").read_text())
    for one in found:
        assert f"| {one.spec} | {one.replayed:.2f}x |" in card
    assert [one["spec"] for one in told["found"]] == [one.spec for one in found]
    assert told["forward_seconds"]["target"]["3"] == pytest.approx(1.02)
    inputs = pair.tokenizer(TEXTS[0], return_tensors="pt")
    plain = pair.target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(
        plain, pair.target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    )
    assert f"{found[0].spec} runs at {found[0].measured:.2f}x" in capsys.readouterr().out
    with pytest.raises(SpeculationError, match="holds a drafter already"):
        run_tune(settings(drafters=choices))


def test_it_says_when_nothing_beats_plain_decoding(pair, settings, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(TuneSettings, "load", lambda _: pair)
    with pretended(pair, (1.0, 1.0), monkeypatch):
        found = run_tune(settings(drafters=["draft_model:num_draft_tokens=4", "prompt_lookup"]))
    assert found[0].measured < 1.03 and "nothing beats plain decoding" in capsys.readouterr().out
    assert not list((tmp_path / "tuned").iterdir())


def test_without_a_draft_model_copies_are_tried(settings) -> None:
    assert settings(draft=None).choices() == [*COPIES, ALONE] and len(COPIES) == 8
    assert settings().choices() == [*COPIES, *DRAFTS] and len(settings().choices()) == 22


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"drafters": ["pearl"]}, "drafter must be one of prompt_lookup"),
        ({"drafters": ["hub_configs/hybrid"]}, "drafter must be one of"),
        ({"drafters": ["draft_model"], "draft": None}, "'draft_model' needs a draft model; name one with --draft"),
        ({"drafters": ["suffix:branches=2"]}, "unknown option 'branches'"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"limit": 0}, "limit"),
    ],
)
def test_bad_settings_are_named(settings, wrong, named) -> None:
    with pytest.raises(SpeculationError, match=named):
        run_tune(settings(**wrong))
