"""Training of heads: what they learn, that it goes on where it stopped, and what is written."""

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_models
import eagle_heads
import models
import pytest
import torch
from head_pairs import never_declined
from heads_alone import logits_drafted_from
from safetensors.torch import load_file
from torch import Tensor
from trainings import killed_at_times, settings_for
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from hf_specdec import DFlashDrafter, Drafter, EagleDrafter, SpeculationError
from hf_specdec.drafters.heads.dflash_format import FORMAT
from hf_specdec.tools.loading.models import Pair
from hf_specdec.train.heads import TRAININGS, HeadSettings
from hf_specdec.train.heads.beginning import layers_config
from hf_specdec.train.heads.blocks import rarest
from hf_specdec.train.heads.eagle import EagleLearner, beginning
from hf_specdec.train.heads.learner import HeadTrainer, Learner, Step, acceptance
from hf_specdec.train.learning import closing, train
from hf_specdec.train.lessons import Lessons, collate
from hf_specdec.train.writing import Text


@pytest.fixture(scope="module")
def target() -> Any:
    return models.counting(7)


@pytest.fixture
def settings(target: Any, tmp_path: Path) -> HeadSettings:
    return HeadSettings(
        **settings_for(target, models.tokenizer(), tmp_path), mlp_size=40, steps=3, epochs=8, learning_rate=3e-2
    )


CONTENT: dict[str, dict[str, Any]] = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rope_theta": 10000.0},
    "dflash": {"speculators_model_type": "dflash", "block_size": 4, "sample_from_anchor": False},
    "dspark": {"speculators_model_type": "dspark", "block_size": 3, "sample_from_anchor": True},
}
LAYERS = {"eagle3": 1, "dflash": 2, "dspark": 2}


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_run_makes_a_head_that_is_right_more_often(
    kind: Any, settings: HeadSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.type = kind
    found = train(TRAININGS[kind], settings)
    said = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert said[0].startswith("step 0 of") and 15 < len(said) < 30 and "tokens per call" in said[-1]
    before = float(said[0].split("would give ")[1].split()[0])
    assert found["promised"] > before + 0.05
    assert found["acceptance"] > float(said[0].rsplit(" ", 1)[1].rstrip("%")) / 100 + 0.1
    folder = Path(settings.output)
    report = json.loads((folder / "training.json").read_text())
    assert report["step_1"] == found["step_1"] and report["settings"]["steps"] == 3
    *lines, command = closing(TRAININGS[kind], settings, found)
    assert f"{found['promised']:.2f} tokens" in lines[0] and "covers" in lines[1]
    assert shlex.split(command)[-4:] == ["--drafter", settings.output, "--prompt", "..."]
    content = json.loads((folder / "draft_model" / "config.json").read_text())
    assert CONTENT[kind].items() <= content.items()
    layers = content.get("transformer_layer_config", content)
    assert (content["draft_vocab_size"], layers["intermediate_size"]) == (80, 40)
    assert layers["num_hidden_layers"] == LAYERS[kind]
    drafter = Drafter.from_pretrained(folder)
    assert isinstance(drafter, EagleDrafter if kind == "eagle3" else DFlashDrafter)
    same = AutoModelForCausalLM.from_pretrained(settings.target)
    never_declined(monkeypatch)  # the target is so fast that nothing would be drafted
    call: dict[str, Any] = {**models.prompts([6]), "max_new_tokens": 40, "do_sample": False}
    assert torch.equal(same.generate(**call), same.generate(**call, assistant_model=drafter))
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_run_that_is_killed_at_any_step_ends_with_the_same_weights(
    kind: Any, settings: HeadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.epochs, settings.type = 1, kind
    whole = train(TRAININGS[kind], settings)
    weights = load_file(Path(settings.output) / "draft_model" / "model.safetensors")
    settings.output += "-again"
    again = killed_at_times(HeadTrainer, lambda: train(TRAININGS[kind], settings), monkeypatch)
    assert again == whole
    for name, tensor in load_file(Path(settings.output) / "draft_model" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def texts_of(target: Any, lengths: list[int]) -> list[Text]:
    """Greedy ones behind three tokens each, as the target writes them."""
    ids = torch.randint(2, models.VOCAB, (len(lengths), 3), generator=torch.Generator().manual_seed(1))
    return [
        Text(target.generate(row[None], max_new_tokens=n - 3, do_sample=False)[0].tolist(), 3, 0.0, i)
        for i, (row, n) in enumerate(zip(ids, lengths, strict=True))
    ]


def a_training(settings: HeadSettings, target: Any, kind: str = "eagle3") -> Any:
    return TRAININGS[kind](settings, Pair(models.tokenizer(), target, None))


def a_learner(settings: HeadSettings, target: Any, known: int, kind: str = "eagle3") -> Learner:
    return a_training(settings, target, kind).learner(texts_of(target, [9]), torch.arange(known) + 5)  # type: ignore[no-any-return]


def told_of(settings: HeadSettings, target: Any, reads: list[int], texts: list[Text], file: Path) -> Lessons:
    training = a_training(settings, target)
    training.reads = [*reads, -1]
    return training.lessons(texts, file)  # type: ignore[no-any-return]


def test_heads_begin_with_their_targets_last_layers(settings: HeadSettings, target: Any) -> None:
    head, last = a_learner(settings, target, known=70).head, target.model.layers[-1]
    g = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.fused(g), g[:, 64:])
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], last.self_attn.q_proj.weight)
    torch.testing.assert_close(head.midlayer.hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[5:75])
    whole = HeadSettings(**vars(settings) | {"mlp_size": None})
    assert torch.equal(a_learner(whole, target, known=70).head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    block = a_learner(whole, target, known=70, kind="dspark").head
    assert torch.equal(block.encoder.fc(g), g[:, 64:])
    for mine, theirs in zip(block.layers, target.model.layers[-2:], strict=True):
        assert torch.equal(mine.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    other = models.build("GPT-2")  # which has layers of other names
    config = layers_config(target, settings.mlp_size, LlamaConfig, 1)
    assert beginning(config, other, torch.arange(97), seed=0).lm_head.weight.isfinite().all()


def says_as_a_reference(learner: Learner, told: Lessons, texts: list[Text], reference: Callable[..., Tensor]) -> None:
    """Each step of each chain, whose logits [V] a reference gives behind a root, where so much of a text is drafted."""
    with torch.no_grad():
        steps = learner(collate([told[i] for i in range(len(texts))]))
    for j, (logits, places, _) in enumerate(steps):
        assert [row.nonzero()[:, 0].tolist() for row in places] == [list(range(2, len(t.ids) - 2 - j)) for t in texts]
        for (b, i), mine in zip(places.nonzero().tolist(), logits, strict=True):
            ids = texts[b].ids
            expected = reference(ids[: i + 2], j, ids[i + 2 :])[learner.teacher.tokens]
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


def test_training_sees_what_drafting_sees(settings: HeadSettings, target: Any, tmp_path: Path) -> None:
    """Each step of each chain says what the slow reference says behind its root, with the text's tokens drafted."""
    texts = texts_of(target, [9, 12, 7])
    learner = a_learner(settings, target, known=70)
    EagleDrafter(learner.head).save_pretrained(tmp_path / "head")
    reference = eagle_heads.Reference(tmp_path / "head" / "draft_model")
    told = told_of(settings, target, reference.states, texts, tmp_path / "states.bin")
    says_as_a_reference(learner, told, texts, lambda text, j, said: reference.chain(target, text, j + 1, said)[j])


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks_see_what_drafting_sees(kind: str, settings: HeadSettings, target: Any, tmp_path: Path) -> None:
    """As the test above."""
    texts, training = texts_of(target, [9, 12, 7]), a_training(settings, target, kind)
    learner, states = training.learner(texts, torch.arange(70) + 5), tmp_path / "states.bin"
    FORMAT.write(tmp_path, training.content, models.loud(learner.head, seed=1).state_dict())
    reference, told = dflash_models.Reference(tmp_path), training.lessons(texts, states)
    says_as_a_reference(learner, told, texts, lambda text, j, said: reference.block(target, text, [*said, 0, 0, 0])[j])


@pytest.mark.parametrize("known", [70, models.VOCAB])
@pytest.mark.parametrize("kind", TRAININGS)
def test_a_saved_head_drafts_what_it_said(
    kind: str, known: int, settings: HeadSettings, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, tokens = a_training(settings, target, kind), torch.arange(known) + min(5, models.VOCAB - known)
    training.covered, learner = 1.0, training.learner(texts_of(target, [9]), tokens)
    models.loud(learner.head, seed=1)
    training.save(learner, {})
    drafter, rounds = Drafter.from_pretrained(settings.output, dtype="float32"), logits_drafted_from(monkeypatch)
    never_declined(monkeypatch)
    target.generate(**models.prompts([6]), max_new_tokens=9, do_sample=False, assistant_model=drafter)
    learner.head.float()
    stored = load_file(Path(settings.output) / "draft_model" / "model.safetensors")
    assert torch.equal(stored["t2d"].nonzero()[:, 0] if "t2d" in stored else torch.arange(models.VOCAB), tokens)
    assert len(rounds) > 4 and max(len(drafted) for _, drafted in rounds) == 3
    for number, (text, drafted) in enumerate(rounds):
        ids = [*text, *(int(logits.argmax()) for logits in drafted)]
        told = training.lessons([Text(ids, len(text) - 1, 0.0, 0)], tmp_path / f"{number}.bin")
        with torch.no_grad():
            steps = learner(collate([told[0]]))
        for logits, step in zip(drafted, steps, strict=False):
            torch.testing.assert_close(step.logits[0], logits[tokens], rtol=1e-3, atol=1e-2)


def test_a_mask_is_what_texts_hold_least() -> None:
    texts = [Text([1, 5, 7, 7, 9], 1, 0.0, 0), Text([1, 8, 5, 7], 1, 0.0, 1)]
    assert [rarest(texts, tokens) for tokens in ([1, 5, 8], [1, 5], [7, 9, 8], [2, 3, 9])] == [8, 5, 9, 3]


@pytest.mark.parametrize("name", ["Qwen2", "Gemma3"])
@pytest.mark.parametrize("kind", TRAININGS)
def test_heads_of_other_targets_learn(kind: str, name: str, settings: HeadSettings, tmp_path: Path) -> None:
    """And know better how sure they are, where they say it."""
    config = models.ARCHITECTURES[name]()
    config.num_hidden_layers, config.layer_types = 5, [config.layer_types[-1]] * 5
    target = models.from_config(config)
    texts, training = texts_of(target, [30] * 4), a_training(settings, target, kind)
    learner, told = training.begin(texts), training.lessons(texts, tmp_path / "states.bin")
    optimizer, batch, losses = torch.optim.Adam(learner.parameters(), 1e-2), collate([told[i] for i in range(4)]), []
    trainer = HeadTrainer(learner, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    for _ in range(30):
        loss = trainer.compute_loss(learner, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_confidence_says_whether_its_token_is_right(settings: HeadSettings, target: Any) -> None:
    learner: Any = a_learner(settings, target, known=70, kind="dspark")
    logits, said = torch.eye(70)[:2] * 9, torch.tensor([5, 9])  # the first is right
    p = logits.softmax(-1)
    places = torch.ones(1, 2, dtype=torch.bool)
    doubts = [
        float(learner.loss(Step(logits, places, torch.tensor(sure)), p, said)) for sure in ([0.9, 0.1], [0.1, 0.9])
    ]
    assert doubts[1] - doubts[0] == pytest.approx(math.log(9), rel=1e-4)


def test_it_learns_what_the_target_says_there(settings: HeadSettings, target: Any, tmp_path: Path) -> None:
    texts = texts_of(target, [9, 12, 7])
    learner = a_learner(settings, target, known=70)
    told = told_of(settings, target, [2, 3, 4], texts, tmp_path / "states.bin")
    batch = collate([told[i] for i in range(len(texts))])
    with torch.no_grad():
        for j, (_, places, _) in enumerate(learner(batch)):
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
    settings: HeadSettings, target: Any, tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that is right where it knows the token and the token can be divided."""
    texts = texts_of(target, [9, 30, 17])
    learner = a_learner(settings, target, known=70)
    told = told_of(settings, target, [2, 3, 4], texts, tmp_path / "states.bin")
    forward = EagleLearner.forward

    def right_at_times(self: Any, batch: dict[str, torch.Tensor]) -> Any:
        steps = forward(self, batch)
        for j, (logits, places, _) in enumerate(steps):
            said = torch.roll(batch["input_ids"], -2 - j, 1)[:, : places.shape[1]][places]
            right = (self.head.tokens == said[:, None]) & (said % every == 0)[:, None]
            wrong = self.head.tokens == said[:, None] - 1
            logits.copy_(9.0 * right + 3.0 * wrong)
        return steps

    monkeypatch.setattr(EagleLearner, "forward", right_at_times)
    found = acceptance(learner, told, rows=2)
    chains = [text.ids[i + 2 : i + 5] for text in texts for i in range(2, len(text.ids) - 4)]
    shares = [sum(all(x % every == 0 and 5 <= x < 75 for x in c[:n]) for c in chains) / len(chains) for n in (1, 2, 3)]
    assert 0 < shares[0] < 1 or every == 1
    assert found["promised"] == pytest.approx(1 + sum(shares)) and found["step_1"] == pytest.approx(shares[0])
    assert found["step_3"] == pytest.approx(shares[2] / shares[1] if shares[1] else 0.0)


def test_states_are_those_that_head_and_target_read(settings: HeadSettings, target: Any, tmp_path: Path) -> None:
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
def test_bad_arguments(settings: HeadSettings, changes: dict[str, Any], message: str) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(SpeculationError, match=message):
        train(TRAININGS["eagle3"], settings)


@pytest.mark.parametrize("kind", TRAININGS)
def test_targets_that_do_not_fit(kind: Any, settings: HeadSettings) -> None:
    models.llama().save_pretrained(settings.target)
    settings.type = kind
    with pytest.raises(SpeculationError, match=r"has 2 layers, and a head reads .* 5 or more"):
        train(TRAININGS[kind], settings)
    config = models.ARCHITECTURES["OPT"]()
    config.num_hidden_layers, config.word_embed_proj_dim = 5, 16
    with pytest.raises(SpeculationError, match=r"has embeddings of width 16 and states of width 32"):
        a_training(settings, models.from_config(config), kind)
