"""Training of EAGLE-3 heads: what they learn, that it goes on where it stopped, and what is written."""

import json
import shlex
from pathlib import Path
from typing import Any

import eagle_heads
import models
import pytest
import torch
from head_pairs import never_declined
from questions import QUESTIONS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specdec import Drafter, EagleDrafter, SpeculationError
from hf_specdec.tools.loading.models import Pair
from hf_specdec.train.eagle import EagleSettings, EagleTraining
from hf_specdec.train.eagle.beginning import beginning
from hf_specdec.train.eagle.learner import EagleTrainer, Learner, acceptance
from hf_specdec.train.eagle.run import head_config
from hf_specdec.train.learning import closing, train
from hf_specdec.train.lessons import Lessons, collate
from hf_specdec.train.writing import Text


@pytest.fixture(scope="module")
def target() -> Any:
    return models.counting(7)


@pytest.fixture
def settings(target: Any, tmp_path: Path) -> EagleSettings:
    target.save_pretrained(tmp_path / "target")
    models.tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "data.txt").write_text("\n".join(QUESTIONS))
    return EagleSettings(
        target=str(tmp_path / "target"),
        output=str(tmp_path / "out"),
        data=[str(tmp_path / "data.txt")],
        own_prompts=10,
        max_new_tokens=16,
        rows=16,
        known_tokens=80,
        mlp_size=40,
        steps=3,
        epochs=12,
        batch_size=4,
        learning_rate=3e-2,
        held_out=0.2,
        dtype="float32",
    )


def test_a_run_makes_a_head_that_is_right_more_often(
    settings: EagleSettings, target: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(EagleTraining, settings)
    said = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert said[0].startswith("step 0 of") and 15 < len(said) < 30 and "tokens per call" in said[-1]
    before = float(said[0].split("would give ")[1].split()[0])
    assert found["promised"] > before + 0.05
    assert found["acceptance"] > float(said[0].rsplit(" ", 1)[1].rstrip("%")) / 100 + 0.1
    folder = Path(settings.output)
    report = json.loads((folder / "training.json").read_text())
    assert report["step_1"] == found["step_1"] and report["settings"]["steps"] == 3
    *lines, command = closing(EagleTraining, settings, found)
    assert f"{found['promised']:.2f} tokens" in lines[0] and "covers" in lines[1]
    assert shlex.split(command)[-4:] == ["--drafter", settings.output, "--prompt", "..."]
    content = json.loads((folder / "draft_model" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle3"] and content["model_type"] == "llama"
    assert (content["draft_vocab_size"], content["intermediate_size"], content["num_hidden_layers"]) == (80, 40, 1)
    assert content["rope_theta"] == 10000.0
    drafter = Drafter.from_pretrained(folder)
    assert isinstance(drafter, EagleDrafter) and drafter.config.num_draft_tokens == 3
    same = AutoModelForCausalLM.from_pretrained(settings.target)
    never_declined(monkeypatch)  # the target is so fast that nothing would be drafted
    call: dict[str, Any] = {**models.prompts([6]), "max_new_tokens": 40, "do_sample": False}
    assert torch.equal(same.generate(**call), same.generate(**call, assistant_model=drafter))
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0


def test_a_run_that_is_killed_at_any_step_ends_with_the_same_weights(
    settings: EagleSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.epochs = 1
    whole = train(EagleTraining, settings)
    weights = load_file(Path(settings.output) / "draft_model" / "model.safetensors")
    honest, steps = EagleTrainer.compute_loss, [0]

    def dying(*arguments: Any, **options: Any) -> Any:
        steps[0] += 1
        if steps[0] % 7 == 0:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(EagleTrainer, "compute_loss", dying)
    settings.output += "-again"
    for _ in range(40):
        try:
            again = train(EagleTraining, settings)
            break
        except KeyboardInterrupt:
            continue
    assert steps[0] > 14 and again == whole
    for name, tensor in load_file(Path(settings.output) / "draft_model" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def texts_of(target: Any, lengths: list[int]) -> list[Text]:
    """Greedy ones behind three tokens each, as the target writes them."""
    ids = torch.randint(2, models.VOCAB, (len(lengths), 3), generator=torch.Generator().manual_seed(1))
    return [
        Text(target.generate(row[None], max_new_tokens=n - 3, do_sample=False)[0].tolist(), 3, 0.0, i)
        for i, (row, n) in enumerate(zip(ids, lengths, strict=True))
    ]


def a_learner(settings: EagleSettings, target: Any, known: int) -> Learner:
    config = head_config(target, settings.mlp_size)
    config.draft_vocab_size = known
    return Learner(beginning(config, target, torch.arange(known) + 5, seed=0), target, settings.steps)


def told_of(settings: EagleSettings, target: Any, reads: list[int], texts: list[Text], file: Path) -> Lessons:
    training = EagleTraining(settings, Pair(models.tokenizer(), target, None))
    training.reads = [*reads, -1]
    return training.lessons(texts, file)


def test_a_head_begins_with_its_targets_last_layer(settings: EagleSettings, target: Any) -> None:
    head, last = a_learner(settings, target, known=70).head, target.model.layers[-1]
    g = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.fused(g), g[:, 64:])
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], last.self_attn.q_proj.weight)
    assert torch.equal(head.midlayer.hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[5:75])
    whole = EagleSettings(**vars(settings) | {"mlp_size": None})
    assert torch.equal(a_learner(whole, target, known=70).head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    other = models.build("GPT-2")  # which has layers of other names
    config = head_config(target, settings.mlp_size)
    config.vocab_size = models.VOCAB
    assert beginning(config, other, torch.arange(97), seed=0).lm_head.weight.isfinite().all()


def test_training_sees_what_drafting_sees(settings: EagleSettings, target: Any, tmp_path: Path) -> None:
    """Each step of each chain says what the slow reference says behind its root, with the text's tokens drafted."""
    texts = texts_of(target, [9, 12, 7])
    learner = a_learner(settings, target, known=70)
    EagleDrafter(learner.head).save_pretrained(tmp_path / "head")
    reference = eagle_heads.Reference(tmp_path / "head" / "draft_model")
    told = told_of(settings, target, reference.states, texts, tmp_path / "states.bin")
    with torch.no_grad():
        steps = learner(collate([told[i] for i in range(len(texts))]))
    for j, (logits, places) in enumerate(steps):
        assert [row.nonzero()[:, 0].tolist() for row in places] == [list(range(2, len(t.ids) - 2 - j)) for t in texts]
        for (b, i), mine in zip(places.nonzero().tolist(), logits, strict=True):
            ids = texts[b].ids
            expected = reference.chain(target, ids[: i + 2], j + 1, ids[i + 2 :])[j]
            torch.testing.assert_close(mine, expected[learner.head.tokens], rtol=1e-3, atol=1e-3)


def test_it_learns_what_the_target_says_there(settings: EagleSettings, target: Any, tmp_path: Path) -> None:
    texts = texts_of(target, [9, 12, 7])
    learner = a_learner(settings, target, known=70)
    told = told_of(settings, target, [2, 3, 4], texts, tmp_path / "states.bin")
    batch = collate([told[i] for i in range(len(texts))])
    with torch.no_grad():
        for j, (_, places) in enumerate(learner(batch)):
            p = [target(torch.tensor([texts[b].ids])).logits[0, i + 1 + j] for b, i in places.nonzero().tolist()]
            known = torch.stack(p)[:, learner.head.tokens]
            last = learner.last(batch, j, places)
            torch.testing.assert_close(learner.teacher.known(last), known.softmax(-1), rtol=1e-3, atol=1e-5)
            if j == 0:
                whole = torch.stack(p).softmax(-1)[:, learner.head.tokens]
                chances = learner.teacher.all(last)[:, learner.head.tokens]
                torch.testing.assert_close(chances, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_an_examination_counts_chains(
    settings: EagleSettings, target: Any, tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that is right where it knows the token and the token can be divided."""
    texts = texts_of(target, [9, 30, 17])
    learner = a_learner(settings, target, known=70)
    told = told_of(settings, target, [2, 3, 4], texts, tmp_path / "states.bin")
    forward = Learner.forward

    def right_at_times(self: Any, batch: dict[str, torch.Tensor]) -> Any:
        steps = forward(self, batch)
        for j, (logits, places) in enumerate(steps):
            said = torch.roll(batch["input_ids"], -2 - j, 1)[:, : places.shape[1]][places]
            right = (self.head.tokens == said[:, None]) & (said % every == 0)[:, None]
            wrong = self.head.tokens == said[:, None] - 1
            logits.copy_(9.0 * right + 3.0 * wrong)
        return steps

    monkeypatch.setattr(Learner, "forward", right_at_times)
    found = acceptance(learner, told, rows=2)
    chains = [text.ids[i + 2 : i + 5] for text in texts for i in range(2, len(text.ids) - 4)]
    shares = [sum(all(x % every == 0 and 5 <= x < 75 for x in c[:n]) for c in chains) / len(chains) for n in (1, 2, 3)]
    assert 0 < shares[0] < 1 or every == 1
    assert found["promised"] == pytest.approx(1 + sum(shares)) and found["step_1"] == pytest.approx(shares[0])
    assert found["step_3"] == pytest.approx(shares[2] / shares[1] if shares[1] else 0.0)


def test_states_are_those_that_head_and_target_read(settings: EagleSettings, target: Any, tmp_path: Path) -> None:
    texts, file = texts_of(target, [9, 12, 7, 30]), tmp_path / "states.bin"
    for reads in ([2, 3, 4], [1, 3, 4]):  # the others of the same texts are not in the file
        told = told_of(settings, target, reads, texts, file)
        for i, text in enumerate(texts):
            hidden = target(torch.tensor([text.ids[:-1]]), output_hidden_states=True).hidden_states
            torch.testing.assert_close(told[i]["states"], torch.cat([hidden[s][0] for s in (*reads, -1)], -1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be from 1 to 16"),
        ({"mlp_size": 0}, "mlp_size must be from 1 to"),
        ({"data": [], "own_prompts": 0}, "there are no prompts to answer"),
        ({"data": [], "answers": "given"}, "answers='given' needs data"),
    ],
)
def test_bad_arguments(settings: EagleSettings, changes: dict[str, Any], message: str) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(SpeculationError, match=message):
        train(EagleTraining, settings)


def test_a_target_of_few_layers_is_refused(settings: EagleSettings) -> None:
    models.llama().save_pretrained(settings.target)
    with pytest.raises(SpeculationError, match=r"has 2 layers, and an EAGLE-3 head reads .* 5 or more"):
        train(EagleTraining, settings)
