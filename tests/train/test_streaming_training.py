"""Training of streams: what they learn, that it goes on where it stopped, and that the target is left alone."""

import errno
import json
import math
import os
import shlex
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from questions import QUESTIONS
from safetensors.torch import load_file
from trainings import killed_at_times, settings_for
from transformers import AutoModelForCausalLM

from hf_specdec import Drafter, SpeculationError, StreamingDrafter
from hf_specdec.drafters.streaming import Upper
from hf_specdec.tools.loading.models import Pair
from hf_specdec.train.learning import closing, train
from hf_specdec.train.lessons import Lessons, collate
from hf_specdec.train.streaming import StreamingSettings, StreamingTraining
from hf_specdec.train.streaming.learner import Learner, MainStream, StreamTrainer
from hf_specdec.train.writing import Text


@pytest.fixture(scope="module")
def target() -> Any:
    return models.counting(3)


@pytest.fixture
def settings(target: Any, tmp_path: Path) -> StreamingSettings:
    return StreamingSettings(
        **settings_for(target, models.tokenizer(), tmp_path),
        streams=2,
        num_layers=2,
        adapter_rank=16,
        map_rank=16,
        prune_rank=4,
        candidates=3,
        epochs=12,
        learning_rate=1e-2,
    )


def test_a_run_makes_streams_that_are_right_more_often(
    settings: StreamingSettings, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = train(StreamingTraining, settings)
    said = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert said[0].startswith("step 0 of") and 15 < len(said) < 30 and "tokens per call" in said[-1]
    before = float(said[0].split("would give ")[1].split()[0])
    assert found["promised"] > before + 0.2 and found["first"] > 0.1
    folder = Path(settings.output)
    report = json.loads((folder / "training.json").read_text())
    assert report["first"] == found["first"] and report["settings"]["streams"] == 2
    *lines, command = closing(StreamingTraining, settings, found)
    assert f"{found['first']:.1%}" in lines[0]
    assert shlex.split(command)[-4:] == ["--drafter", settings.output, "--prompt", "..."]
    drafter = Drafter.from_pretrained(folder)
    assert drafter.config.acceptance == found["acceptance"]  # type: ignore[attr-defined]
    same = AutoModelForCausalLM.from_pretrained(settings.target)
    call: dict[str, Any] = {**models.prompts([6]), "max_new_tokens": 40, "do_sample": False}
    assert torch.equal(same.generate(**call), same.generate(**call, assistant_model=drafter))
    stats = drafter.last_stats
    assert stats is not None and stats.accepted_tokens > 0


def test_a_run_that_is_killed_at_any_step_ends_with_the_same_weights(
    settings: StreamingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.epochs = 1
    whole = train(StreamingTraining, settings)
    weights = load_file(Path(settings.output) / "model.safetensors")
    settings.output += "-again"
    again = killed_at_times(StreamTrainer, lambda: train(StreamingTraining, settings), monkeypatch)
    assert again["acceptance"] == whole["acceptance"]
    for name, tensor in load_file(Path(settings.output) / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.slow
def test_a_training_goes_on_from_streams_that_are_there(
    settings: StreamingSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.epochs = 2
    found = train(StreamingTraining, settings)
    capsys.readouterr()
    more = replace(settings, output=str(tmp_path / "more"), start_from=settings.output)
    train(StreamingTraining, more)
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 0"))
    assert f"would give {found['promised']:.2f} tokens" in first
    known = [load_file(Path(folder) / "model.safetensors")["known"] for folder in (settings.output, more.output)]
    assert torch.equal(*known)
    with pytest.raises(SpeculationError, match="start_from"):
        train(StreamingTraining, replace(more, streams=3, output=str(tmp_path / "other")))
    with pytest.raises(SpeculationError, match=r"start_from.*rotation"):
        train(StreamingTraining, replace(more, rotation=0.01, output=str(tmp_path / "turned")))


def a_training(settings: StreamingSettings, target: Any) -> StreamingTraining:
    return StreamingTraining(settings, Pair(models.tokenizer(), target, None))


def a_learner(settings: StreamingSettings, target: Any, texts: list[Text], file: Path) -> tuple[Learner, Lessons]:
    training = a_training(settings, target)
    learner = training.begin(texts)
    for weight in learner.streams.parameters():
        weight.data.normal_(0, 0.3)
    return learner, training.lessons(texts, file)


def texts_of(target: Any, lengths: list[int]) -> list[Text]:
    ids = models.prompts(lengths)["input_ids"].tolist()
    return [
        Text(row[len(row) - n :], 2 + i % 3, float(i % 2), i)
        for i, (row, n) in enumerate(zip(ids, lengths, strict=True))
    ]


def test_training_sees_what_decoding_sees(settings: StreamingSettings, target: Any, tmp_path: Path) -> None:
    """Each stream's logits are those of a plain causal forward over its own prefix with the streams behind it."""
    texts = texts_of(target, [9, 12, 7])
    learner, lessons = a_learner(settings, target, texts, tmp_path / "states.bin")
    upper, training = Upper(target, settings.num_layers), a_training(settings, target)
    batch = collate([lessons[i] for i in range(len(lessons))])
    with torch.no_grad():
        logits, _, _ = learner(batch)
        for b, text in enumerate(texts):
            for i, at in enumerate(batch["at"][b].tolist()):
                if not batch["counts"][b, i]:
                    continue
                main = training.read(torch.tensor([text.ids[: at + 1]]))
                whole = torch.cat([main, learner.streams.begin(main[:, -1:])], 1)
                n = whole.shape[1]
                mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
                with learner.streams.beside(upper, at + 1, n):
                    out = upper.run(whole, mask, torch.arange(n)[None])
                expected = learner.streams.head(upper, out[:, at + 1 :])[0]
                torch.testing.assert_close(logits[b, i], expected, rtol=1e-4, atol=1e-4)


def test_streams_ask_for_the_tokens_further_on(settings: StreamingSettings, target: Any, tmp_path: Path) -> None:
    texts = texts_of(target, [9, 12, 7])
    learner, lessons = a_learner(settings, target, texts, tmp_path / "states.bin")
    batch = collate([lessons[i] for i in range(len(lessons))])
    wanted, known = learner.wanted(batch), learner.streams.known.tolist()
    for b, text in enumerate(texts):
        for i in range(len(text.ids) - text.start):
            at = text.start - 1 + i
            for j in range(3):
                token = text.ids[at + 1 + j] if at + 1 + j < len(text.ids) else None
                assert int(wanted[b, i, j]) == (known.index(token) if token in known else -1)
        assert (wanted[b, len(text.ids) - text.start :] == -1).all()


def test_states_are_read_once(settings: StreamingSettings, target: Any, tmp_path: Path, monkeypatch: Any) -> None:
    texts, reads = texts_of(target, [9, 12, 7, 30]), []
    training = a_training(settings, target)
    first = training.lessons(texts, tmp_path / "states.bin")
    for i, text in enumerate(texts):
        torch.testing.assert_close(first[i]["states"], training.read(torch.tensor([text.ids[:-1]]))[0])
    kept, honest = [first[i]["states"].clone() for i in range(4)], training.read
    monkeypatch.setattr(training, "read", lambda ids: reads.append(ids.numel()) or honest(ids))
    again = training.lessons(texts, tmp_path / "states.bin")
    assert all(torch.equal(again[i]["states"], kept[i]) for i in range(4))
    assert reads == [1], "one token, which says how large states are"
    training.lessons(texts[:3], tmp_path / "states.bin")
    assert len(reads) > 2, "other texts are not in there"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers must be below the target's 3 layers"),
        ({"streams": 0}, "streams must be from 1 to 16"),
        ({"rotation": 0.01, "adapter_rank": 0, "map_rank": 0}, "adapter_rank or map_rank must be 1 or more"),
        ({"adapted": ["mlp.no_proj"]}, "adapt names mlp.no_proj, .* they have .*mlp.up_proj"),
        ({"data": [], "own_prompts": 0}, "there are no prompts to answer"),
    ],
)
def test_bad_arguments(settings: StreamingSettings, changes: dict[str, Any], message: str) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(SpeculationError, match=message):
        train(StreamingTraining, settings)


# ---------------------------------------------------------------------- tuned together with the target


def test_a_tuned_target_says_what_it_was_given(settings: StreamingSettings, tmp_path: Path) -> None:
    """It learns the answers of the data; its drafter serves the tuned target, and no other."""
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "abcabcabc"}]} for q in QUESTIONS
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings.data, settings.mode, settings.answers = [str(tmp_path / "data.jsonl")], "tuned", "given"
    settings.epochs = 20
    train(StreamingTraining, settings)
    drafter = Drafter.from_pretrained(settings.output)
    assert isinstance(drafter, StreamingDrafter) and drafter.config.mode == "tuned"
    target = AutoModelForCausalLM.from_pretrained(settings.target)
    call: dict[str, Any] = {**models.prompts([7, 5, 9]), "max_new_tokens": 30, "do_sample": False}
    before = target.generate(**call)
    with pytest.raises(SpeculationError, match=r"call drafter.tune\(target\) first"):
        target.generate(**call, assistant_model=drafter)
    drafter.tune(target)
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    drafter.tune(target)  # it is already
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())
    tuned = target.generate(**call)
    assert not torch.equal(tuned, before)
    assert torch.equal(target.generate(**call, assistant_model=drafter), tuned)
    ids = torch.tensor([models.tokenizer()(QUESTIONS[0])["input_ids"]])
    answer = models.tokenizer()("abcabcabc")["input_ids"]
    said = target.generate(ids, max_new_tokens=len(answer), do_sample=False)[0, ids.shape[1] :].tolist()
    assert sum(map(int.__eq__, said, answer)) > len(answer) / 2
    target.save_pretrained(tmp_path / "tuned")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert torch.equal(again.generate(**call, assistant_model=drafter), tuned)
    assert {file.name for file in (Path(settings.output) / "lora").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    other = StreamingDrafter(mode="untouched")
    with pytest.raises(SpeculationError, match="leave their target untouched"):
        other.tune(again)


def alone(learner: Learner, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The streams' logits, with a main stream that hands no gradient on."""
    honest = MainStream.update

    def detached(self: MainStream, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> Any:
        if layer not in self.states:
            honest(self, keys.detach(), values.detach(), layer)
            return keys, values
        return honest(self, keys, values, layer)

    MainStream.update = detached  # type: ignore[method-assign]
    try:
        return learner(batch)[0]
    finally:
        MainStream.update = honest  # type: ignore[method-assign]


def test_a_tuned_main_stream_learns_from_streams_as_well(
    settings: StreamingSettings, target: Any, tmp_path: Path
) -> None:
    """Joint training (Eq. 5): the streams' loss reaches the adapters through the main stream's keys and values, too;
    with an untouched target nothing does."""
    texts = texts_of(target, [9, 12, 7])
    for mode in ("untouched", "tuned"):
        settings.mode = mode  # type: ignore[assignment]
        target = deepcopy(target)
        learner, lessons = a_learner(settings, target, texts, tmp_path / f"{mode}.bin")
        batch = collate([lessons[i] for i in range(len(lessons))])
        streams, _, main = learner(batch)
        assert (main is not None) == (mode == "tuned")
        if main is not None:
            weight = learner.streams.adapters[0]["self_attn/k_proj"].up.weight
            (of_streams,) = torch.autograd.grad(streams.sum(), [weight], retain_graph=True)
            (by_itself,) = torch.autograd.grad(alone(learner, batch).sum(), [weight])
            assert (of_streams - by_itself).abs().max() > 1e-3  # by way of the main stream
            with torch.no_grad():
                learner.streams.merge(Upper(target, settings.num_layers))
                for b, text in enumerate(texts):
                    said = target(torch.tensor([text.ids[:-1]])).logits[0, text.start - 1 :]
                    torch.testing.assert_close(main[b, : len(said)], said, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("line", ['{"prompt": "ab"}', '{"messages": [{"role": "user", "content": "ab"}]}'])
def test_answers_that_are_not_given(settings: StreamingSettings, tmp_path: Path, line: str) -> None:
    (tmp_path / "data.jsonl").write_text(line)
    settings.data, settings.answers = [str(tmp_path / "data.jsonl")], "given"
    with pytest.raises(SpeculationError, match=r"line 1 has no answer to learn.*ref \(e2e_nlg\)"):
        train(StreamingTraining, settings)


@pytest.mark.parametrize("at", ["states", "checkpoint"])
def test_a_full_disk_loses_nothing(settings: StreamingSettings, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings.epochs = 1
    with monkeypatch.context() as patch:
        if at == "states":
            patch.setattr(os, "posix_fallocate", full)
        else:
            patch.setattr(StreamTrainer, "_save_checkpoint", full)
        with pytest.raises(SpeculationError, match="No space left on device"):
            train(StreamingTraining, settings)
    assert not list(Path(settings.output).rglob("*.partial"))
    assert train(StreamingTraining, settings)["promised"] >= 1


def test_a_loss_that_is_no_number(settings: StreamingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, steps = StreamTrainer.compute_loss, [0]

    def spoilt(*arguments: Any, **options: Any) -> Any:
        steps[0] += 1
        return honest(*arguments, **options) * (math.nan if steps[0] == 9 else 1.0)

    settings.epochs = 1
    with monkeypatch.context() as patch:
        patch.setattr(StreamTrainer, "compute_loss", spoilt)
        with pytest.raises(
            SpeculationError, match=r"the loss is nan at step 9, with a learning rate of 0\.01; lower learning_rate"
        ):
            train(StreamingTraining, settings)
    assert train(StreamingTraining, settings)["promised"] >= 1
