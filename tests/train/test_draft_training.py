"""Training a draft: the target's texts, its lessons, and a run that may end and begin again."""

import copy
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from questions import LETTERS, QUESTIONS
from trainings import settings_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import DraftModelDrafter, SpeculationError
from hf_specdec.tools.loading.models import Pair
from hf_specdec.train import writing
from hf_specdec.train.draft import DraftSettings, DraftTraining, distilling
from hf_specdec.train.draft.cutting import cut, take_over
from hf_specdec.train.draft.distilling import Learner, acceptance
from hf_specdec.train.learning import closing, train
from hf_specdec.train.lessons import Lessons, batched, collate, read_lessons
from hf_specdec.train.writing import Asked, Text, most_frequent, own_prompts, prompts_of, read_texts, write_texts

TEMPLATE = (
    "{% for m in messages %}<s>{{ 'ab' if m['role'] == 'user' else 'cd' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>cd{% endif %}"
)


@pytest.fixture(scope="module")
def target() -> Any:
    """Each token follows from the last one, mostly, through both layers: there is something to learn."""
    target = models.llama(num_hidden_layers=2)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
    return target


@pytest.fixture
def tokenizer() -> Any:
    return models.tokenizer()


PROMPTS = [Asked([2 + i, 3, 4 + i % 5][: 2 + i % 2], float(i % 2), 10 + i) for i in range(12)]


def written(target: Any, tokenizer: Any, file: Path, prompts: list[Asked] = PROMPTS) -> list[Text]:
    return write_texts(target, tokenizer, prompts, file, max_new_tokens=8, rows=3, seed=0)


@pytest.fixture
def texts(target: Any, tokenizer: Any, tmp_path: Path) -> list[Text]:
    return written(target, tokenizer, tmp_path / "texts.jsonl")


# ---------------------------------------------------------------------- texts


def test_texts_are_what_the_target_says(target: Any, texts: list[Text]) -> None:
    assert [text.prompt for text in texts] == [prompt.number for prompt in PROMPTS]
    for text, prompt in zip(texts, PROMPTS, strict=True):
        assert text.ids[: text.start] == prompt.ids and len(text.ids) == text.start + 8
        if not text.temperature:
            alone = target.generate(torch.tensor([prompt.ids]), max_new_tokens=8, do_sample=False)
            assert text.ids == alone[0].tolist()


@pytest.mark.parametrize("ends", [5, [5, 7], None])
def test_a_text_ends_where_the_model_ends_it(target: Any, tokenizer: Any, tmp_path: Path, ends: Any) -> None:
    stock = target.generation_config.eos_token_id
    target.generation_config.eos_token_id = ends
    tokenizer.eos_token = "<s>"  # which ends nothing
    try:
        texts = written(target, tokenizer, tmp_path / "texts.jsonl", [Asked([i], 0.0, i) for i in range(2, 97)])
    finally:
        target.generation_config.eos_token_id = stock
    known = set(ends if isinstance(ends, list) else [ends])
    short = [text for text in texts if len(text.ids) < text.start + 8]
    assert all(text.ids[-1] in known and not known & set(text.ids[text.start : -1]) for text in short)
    assert bool(short) == (ends is not None)


def test_writing_goes_on_behind_an_interruption(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, honest, calls = written(target, tokenizer, tmp_path / "whole.jsonl"), writing._continue, []

    def dies(*arguments: Any) -> list[Text]:
        calls.append(len(arguments[2]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(writing, "_continue", dies)
    file = tmp_path / "parts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        written(target, tokenizer, file)
    assert len(read_texts(file)) == 6
    file.write_bytes(file.read_bytes()[:-9])  # the last line was not written to its end
    assert len(read_texts(file)) == 5
    again = written(target, tokenizer, file)
    assert sum(calls[3:]) == 7
    assert [t.prompt for t in again] == [t.prompt for t in whole]
    assert [t for t in again if not t.temperature] == [t for t in whole if not t.temperature]
    lines = [json.loads(line) for line in file.read_text().splitlines()]  # nothing is appended to half a line
    assert len(lines) == len(PROMPTS)
    assert written(target, tokenizer, file) == again and len(calls) == 3 + len(calls[3:])


def test_lines_that_are_no_texts_are_left_out(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    whole = written(target, tokenizer, file)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], "5", '{"ids": [1]}', lines[3][:20] + lines[4], *lines[5:]]) + "\n")
    assert len(read_texts(file)) == len(whole) - 2
    assert len(written(target, tokenizer, file)) == len(whole)


def test_other_prompts_take_only_their_own_texts(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    first = written(target, tokenizer, tmp_path / "texts.jsonl", PROMPTS[:6])
    moved = [Asked(p.ids, p.temperature, p.number + 100) for p in PROMPTS[3:]]
    texts = written(target, tokenizer, tmp_path / "texts.jsonl", moved)
    assert [text.prompt for text in texts] == [prompt.number for prompt in moved]
    assert [text.ids for text in texts[:3]] == [text.ids for text in first[3:]]


# -------------------------------------------------------------------- prompts


def test_prompts_are_in_the_template_or_as_they_are(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    prompts = prompts_of(tokenizer, QUESTIONS, raw=0.3, sampled=0.5, longest=1000, seed=0)
    raw = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    begun = [tokenizer(f"<s>ab{question}<s>cd")["input_ids"] for question in QUESTIONS]
    assert all(p.ids in (raw[p.number], begun[p.number]) for p in prompts)
    assert 5 < sum(p.ids == raw[p.number] for p in prompts) < 35
    assert Counter(p.temperature for p in prompts).keys() == {0.0, 1.0}
    assert prompts == prompts_of(tokenizer, QUESTIONS, raw=0.3, sampled=0.5, longest=1000, seed=0)


def test_prompts_too_long_empty_or_twice_are_left_out(tokenizer: Any) -> None:
    questions = ["abc", "", "abcabcabcabcabcabc", "abc", "hi"]
    prompts = prompts_of(tokenizer, questions, raw=1.0, sampled=0.0, longest=3, seed=0)
    assert [p.number for p in prompts] == [0, 4]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_prompts_of_its_own(target: Any, tokenizer: Any, tmp_path: Path, template: str | None) -> None:
    tokenizer.chat_template = template
    begin = tokenizer("<s>ab" if template else "<s>")["input_ids"]
    assert writing._begin_of_a_turn(tokenizer) == begin
    file = tmp_path / "prompts.json"
    some = own_prompts(target, tokenizer, 5, 3, 0, file)
    assert len(some) == 5 and all(len(words) > 15 and "<s>" not in words for words in some)
    more = own_prompts(target, tokenizer, 8, 3, 0, file)
    assert more[:5] == some and len(set(more)) > 5
    assert own_prompts(target, tokenizer, 2, 3, 0, file) == some[:2]


def test_a_target_without_prompts_is_a_clear_error(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.generation_config, "eos_token_id", list(range(models.VOCAB)))
    with pytest.raises(SpeculationError, match="own_prompts"):
        own_prompts(target, tokenizer, 2, 3, 0, tmp_path / "prompts.json")
    tokenizer.bos_token = None
    with pytest.raises(SpeculationError, match="own_prompts"):
        own_prompts(target, tokenizer, 2, 3, 0, tmp_path / "prompts.json")


# ------------------------------------------------------------ tokens, lessons


def test_the_most_frequent_tokens(texts: list[Text]) -> None:
    tokens, covered = most_frequent(texts, models.VOCAB, 20, [0, 96])
    counts = Counter(token for text in texts for token in text.ids[text.start :])
    assert len(tokens) == 20 and tokens.tolist() == sorted(set(tokens.tolist())) and {0, 96} <= set(tokens.tolist())
    common = [token for token, _ in counts.most_common(8)]
    assert set(common) <= set(tokens.tolist())
    assert covered == pytest.approx(sum(counts[token] for token in tokens.tolist()) / counts.total())
    everything, covered = most_frequent(texts, models.VOCAB, 1000, [0])
    assert everything.tolist() == list(range(models.VOCAB)) and covered == 1


def lessons_of(target: Any, texts: list[Text], file: Path) -> Lessons:
    read = lambda ids: target.base_model(input_ids=ids).last_hidden_state  # noqa: E731
    return read_lessons(texts, file, read, torch.device("cpu"), None)


@torch.no_grad()
def test_lessons_are_the_targets_chances(target: Any, texts: list[Text], tmp_path: Path) -> None:
    tokens, _ = most_frequent(texts, models.VOCAB, 40, [0])
    lessons, learner = lessons_of(target, texts, tmp_path / "lessons.bin"), Learner(cut(target, [0], tokens), target)
    assert len(lessons) == len(texts)
    batch = collate([lessons[i] for i in range(len(texts))])
    last = learner.places(batch["states"], batch)
    logits = torch.cat([target(torch.tensor([text.ids])).logits[0, text.start - 1 : -1] for text in texts]).float()
    torch.testing.assert_close(learner.teacher.all(last), logits.softmax(-1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(learner.teacher.known(last), logits[:, tokens].softmax(-1), rtol=1e-3, atol=1e-5)
    assert learner(batch).shape == (len(last), 40)


def test_batches_of_lessons_are_bounded() -> None:
    texts = [Text([0] * n, 1, 0.0, n) for n in (*[2] * 9, 500, 900, 1500, 3000)]
    order, sizes = list(range(len(texts))), []
    while order:
        batch, order = batched(order, texts)
        sizes.append(len(batch) * max(len(texts[i].ids) for i in batch))
    assert max(sizes[:-1]) <= 2048 and sizes[-1] == 3000


def test_acceptance_of_the_target_itself_is_one(target: Any, texts: list[Text], tmp_path: Path) -> None:
    tokens = torch.arange(models.VOCAB)
    whole = Learner(cut(target, [0, 1], tokens), target)
    found = acceptance(whole, lessons_of(target, texts, tmp_path / "lessons.bin"), rows=5)
    assert found["greedy_match"] == 1 and found["acceptance"] == pytest.approx(1, abs=1e-3)
    greedy = lessons_of(target, [text for text in texts if not text.temperature], tmp_path / "greedy.bin")
    assert acceptance(whole, greedy, rows=5).keys() == {"greedy_match"}


# --------------------------------------------------------------------- losses


def test_losses_are_as_their_names_say() -> None:
    p, q = (torch.rand(7, 20).softmax(-1) for _ in range(2))
    assert torch.allclose(distilling.cross_entropy(p, q.log()), -(p * q.log()).sum(-1))
    assert torch.allclose(distilling.total_variation(p, q.log()), (p - q).abs().sum(-1) / 2, atol=1e-6)


def test_total_variation_makes_acceptance_its_goal() -> None:
    """One q for three texts, of which two agree: cross entropy settles on the mean, and α is 0.64; total variation on
    those two, and α is 0.73."""
    p, found = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]]), {}
    for name, trainer in distilling.TRAINERS.items():
        logits = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.01)
        for _ in range(600):
            optimizer.zero_grad()
            trainer.distance(p, logits.log_softmax(-1).expand(3, -1)).mean().backward()
            optimizer.step()
        found[name] = float(torch.minimum(p, logits.detach().softmax(-1)).sum(-1).mean())
    assert found == {"cross_entropy": pytest.approx(0.643, abs=0.01), "tv": pytest.approx(0.733, abs=0.01)}


def test_total_variation_raises_acceptance_on_held_out_texts_by_more(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """From a draft that cross entropy has begun to train: by 0.04 with cross entropy, by 0.08 with total variation."""
    prompts = [Asked([2 + i % 90, 3, 4 + i % 5], 1.0, i) for i in range(120)]
    texts = write_texts(target, tokenizer, prompts, tmp_path / "texts.jsonl", max_new_tokens=12, rows=40, seed=0)
    tokens, _ = most_frequent(texts, models.VOCAB, 80, [0])
    lessons, examination = (
        lessons_of(target, part, tmp_path / name)
        for name, part in (("lessons.bin", texts[:80]), ("held_out.bin", texts[80:]))
    )

    def trained(draft: Any, loss: Any, steps: int, learning_rate: float) -> Any:
        learner, order = Learner(copy.deepcopy(draft), target), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=learning_rate)
        for _ in range(steps):
            some = torch.randperm(len(lessons), generator=order)[:16].tolist()
            batch = collate([lessons[i] for i in some])
            p = learner.teacher.known(learner.places(batch["states"], batch))
            optimizer.zero_grad()
            loss(p, learner(batch).log_softmax(-1)).mean().backward()
            optimizer.step()
        return learner

    begun = trained(cut(target, [1], tokens).float(), distilling.cross_entropy, 80, 5e-3)
    before = acceptance(begun, examination, 40)["acceptance"]
    entropy, tv = (
        acceptance(trained(begun.draft, loss, 50, 1e-3), examination, 40)["acceptance"] - before
        for loss in (distilling.cross_entropy, distilling.total_variation)
    )
    assert tv > entropy + 0.02 > 0.03, (before, entropy, tv)


# ------------------------------------------------------------------ whole runs


def test_a_draft_goes_on_from_an_earlier_one(target: Any) -> None:
    earlier, layers = cut(target, [0, 1], torch.arange(0, 60)), [0, 1]
    with torch.no_grad():
        for weight in earlier.parameters():
            weight.add_(1.0)
    draft, fresh = (cut(target, layers, torch.arange(30, 90)) for _ in range(2))
    take_over(draft, earlier)
    for mine, other, was in (
        (draft.model.embed_tokens, earlier.model.embed_tokens, fresh.model.embed_tokens),
        (draft.lm_head, earlier.lm_head, fresh.lm_head),
    ):
        assert torch.equal(mine.weight[:30], other.weight[30:])  # tokens 30 to 59, which both know
        assert torch.equal(mine.weight[30:], was.weight[30:])
    assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, earlier.model.layers[1].mlp.up_proj.weight)
    assert draft.token_of.tolist() == list(range(30, 90))
    for other in (cut(target, [0], torch.arange(60)), target):
        with pytest.raises(SpeculationError, match="start_from must be a draft that was cut out of this target with 2"):
            take_over(draft, other)


@pytest.fixture
def settings(target: Any, tokenizer: Any, tmp_path: Path) -> DraftSettings:
    return DraftSettings(**settings_for(target, tokenizer, tmp_path), layers=[1], epochs=6, learning_rate=5e-3)


def examined(settings: DraftSettings, target: Any, draft: Any) -> dict[str, float]:
    """What the run's own examination says of a draft."""
    texts = read_texts(Path(settings.output) / "training" / "texts.jsonl")
    return acceptance(Learner(draft, target), lessons_of(target, texts, Path(settings.output) / "all.bin"), 16)


def test_a_run_makes_a_better_draft_than_the_cut_alone(
    settings: DraftSettings, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = train(DraftTraining, settings)
    said = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert (
        said[0].startswith("step 0 of")
        and 15 < len(said) == len(set(said)) < 30
        and "acceptance at temperature 1" in said[-1]
    )
    draft = AutoModelForCausalLM.from_pretrained(settings.output, dtype=torch.float32)
    before, after = (examined(settings, target, model) for model in (cut(target, [1], draft.token_of), draft))
    assert after["greedy_match"] > before["greedy_match"] + 0.1 and after["acceptance"] > before["acceptance"]
    report = json.loads((Path(settings.output) / "training.json").read_text())
    assert report["greedy_match"] == found["greedy_match"] and report["settings"]["layers"] == [1]
    assert found["parameters"] == draft.num_parameters() and 0.5 < found["covered"] <= 1
    *lines, command = closing(DraftTraining, settings, found)
    assert f"{found['greedy_match']:.1%}" in lines[0]
    assert shlex.split(command)[:4] == ["hf-specdec", "generate", "--target", settings.target]
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    call: dict[str, Any] = {**models.prompts([6]), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(**call), target.generate(**call, assistant_model=drafter))
    assert AutoTokenizer.from_pretrained(settings.output)("abc")["input_ids"]


def test_an_interrupted_run_goes_on(
    settings: DraftSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, losses = distilling.Distillation.compute_loss, []

    def counts(*arguments: Any, **options: Any) -> Any:
        losses.append(1)
        if len(losses) == 40:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(distilling.Distillation, "compute_loss", counts)
    with pytest.raises(KeyboardInterrupt):
        train(DraftTraining, settings)
    assert "run the same command again to continue" in capsys.readouterr().err
    (folder,) = (Path(settings.output) / "training" / "checkpoints").iterdir()
    (checkpoint,) = folder.iterdir()
    done = int(checkpoint.name.split("-")[1])
    assert 30 < done < 40
    (folder / "checkpoint-39").mkdir()  # one that an interruption cut
    found = train(DraftTraining, settings)
    out = capsys.readouterr().out
    total = int(out.split(" of ")[1].split(",")[0])
    assert f"step {done} of {total}" in out and "step 0 of" not in out
    assert len(losses) == 40 + total - done
    assert train(DraftTraining, settings) == pytest.approx(found) and len(losses) == 40 + total - done
    train(DraftTraining, DraftSettings(**vars(settings) | {"layers": [0], "epochs": 1}))
    assert "step 0 of" in capsys.readouterr().out, "the checkpoints of another training are no beginning of this one"


def test_the_loss_is_chosen_and_tells_trainings_apart(
    settings: DraftSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.epochs, learned = 0.5, {}
    for settings.loss in ("cross_entropy", "tv"):
        train(DraftTraining, settings)
        assert "step 0 of" in capsys.readouterr().out
        assert json.loads((Path(settings.output) / "training.json").read_text())["settings"]["loss"] == settings.loss
        learned[settings.loss] = AutoModelForCausalLM.from_pretrained(settings.output).lm_head.weight
    assert not torch.equal(learned["cross_entropy"], learned["tv"])


def test_a_draft_of_a_target_that_ties_its_embeddings(settings: DraftSettings) -> None:
    models.llama(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(settings.target)
    settings.epochs = 0.5
    train(DraftTraining, settings)
    draft = AutoModelForCausalLM.from_pretrained(settings.output)
    assert draft.lm_head.weight is draft.model.embed_tokens.weight


def test_another_target_does_not_learn_from_these_texts(settings: DraftSettings, tmp_path: Path) -> None:
    settings.epochs = 0.1
    train(DraftTraining, settings)
    models.llama(num_hidden_layers=2, seed=9).save_pretrained(tmp_path / "target")
    with pytest.raises(SpeculationError, match=r"other target; name another folder"):
        train(DraftTraining, settings)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"data": ["nowhere.txt"]}, "nowhere.txt"),
        ({"data": [], "own_prompts": 0}, "no prompts to answer"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 512}, "max_new_tokens=512"),
        ({"limit": 0}, "limit"),
        ({"seed": -1}, "seed"),
        ({"epochs": float("nan")}, "epochs"),
        ({"layers": [2]}, "layers must name at least one layer, from 0 to 1"),
        ({"known_tokens": 1}, "known_tokens"),
        ({"loss": "kl"}, "loss must be 'cross_entropy' or 'tv', got 'kl'"),
    ],
)
def test_bad_settings_are_refused_before_the_work_begins(settings: DraftSettings, change: dict, word: str) -> None:
    with pytest.raises(SpeculationError, match=word):
        train(DraftTraining, DraftSettings(**vars(settings) | change))
    assert not (Path(settings.output) / "training" / "texts.jsonl").exists()


def test_an_output_that_cannot_be_written(settings: DraftSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculationError, match="cannot write to output"):
        train(DraftTraining, DraftSettings(**vars(settings) | {"output": str(tmp_path / "file")}))


def test_what_no_draft_can_be_cut_out_of(settings: DraftSettings, tmp_path: Path) -> None:
    models.build("GPT-2").save_pretrained(tmp_path / "target")
    with pytest.raises(SpeculationError, match="GPT2LMHeadModel"):
        train(DraftTraining, settings)
    with pytest.raises(SpeculationError, match="known_tokens"):
        DraftTraining(DraftSettings(target="", output="", known_tokens=16), _many_special())


def _many_special() -> Any:
    tokenizer = models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [a + b for a in "ab" for b in LETTERS]})
    return Pair(tokenizer, models.llama(), None)
