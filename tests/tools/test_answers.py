"""Files of answers: what is there stays, whoever dies; what is missing is answered; the order is the prompts'."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from printed import TEMPLATE
from processes import until

from hf_specdec import AnswerFile, SpeculationError
from hf_specdec.tools.demo import GenerateSettings, many, run_generate
from hf_specdec.tools.loading.chat import prompt_ids
from hf_specdec.tools.loading.models import Pair, TargetSettings, load_model, load_tokenizer
from hf_specdec.tools.loading.prompts import Prompt, all_prompts, load_prompts

PAIR = Path(__file__).parents[1] / "pair"
PROMPTS = ["def add(a, b):", "for i in range(", "def add(a, b):", "Question: 2 + 2?\nAnswer:", "import os\n"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(path, prompts, numbers, **settings):
    file = AnswerFile(path, prompts, **settings)
    for number in numbers:
        file.add(number, text=prompts[number].upper())
    return file


# ---------------------------------------------------------------------- the file


def test_lines_come_in_any_order_and_end_in_the_prompts(tmp_path):
    path = tmp_path / "new folder" / "answers.jsonl"
    file = answered(path, PROMPTS, [4, 0, 2, 3, 1])
    assert not path.exists()
    file.finish()
    assert [line["prompt"] for line in lines(path)] == PROMPTS
    assert [line["text"] for line in lines(path)] == [prompt.upper() for prompt in PROMPTS]
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    assert AnswerFile(path, PROMPTS).missing == []


@pytest.mark.parametrize("end", range(1, 60, 7))
def test_a_torn_line_is_answered_again_and_no_other(tmp_path, end):
    path = tmp_path / "answers.jsonl"
    answered(path, PROMPTS, [3, 1])
    part = tmp_path / "answers.jsonl.part"
    part.write_bytes(part.read_bytes()[:-end])
    file = AnswerFile(path, PROMPTS)
    assert file.missing == ([0, 2, 4] if end == 1 else [0, 1, 2, 4])  # a whole line but for its end of line is one
    for number in file.missing:
        file.add(number, text="later")
    assert AnswerFile(path, PROMPTS).missing == []
    file.finish()
    assert [line["text"] for line in lines(path)][3] == PROMPTS[3].upper()


def test_any_text_is_kept_as_it_is(tmp_path):
    """Line breaks of every kind, letters of any script, and halves of pairs, which JSON can name and UTF-8 cannot."""
    prompts = ["a\nb\r\u2028c", "\ud83d", "日本語 🙂", {"role": "user", "content": "x"}]
    file = AnswerFile(tmp_path / "answers.jsonl", prompts)
    for number, prompt in enumerate(prompts):
        file.add(number, text=prompt)
    (tmp_path / "answers.jsonl.partly").write_text("somebody else's")
    file.finish()
    found = [json.loads(line) for line in file.path.read_bytes().split(b"\n")[:-1]]
    assert [line["text"] for line in found] == prompts and AnswerFile(file.path, prompts).missing == []
    assert (tmp_path / "answers.jsonl.partly").exists()


def test_a_prompt_that_is_there_twice_is_answered_twice(tmp_path):
    file = answered(tmp_path / "answers.jsonl", PROMPTS, [0])
    assert file.ids[0] != file.ids[2] and AnswerFile(file.path, PROMPTS).missing == [1, 2, 3, 4]


def test_prompts_may_be_added_and_moved(tmp_path):
    answered(tmp_path / "answers.jsonl", PROMPTS[:3], [0, 1, 2]).finish()
    more = ["first", *PROMPTS[:3][::-1], "last"]
    file = AnswerFile(tmp_path / "answers.jsonl", more)
    assert file.missing == [0, 4]


def test_parts_are_joined_and_all_begin_alike(tmp_path):
    """Each process sees the same missing prompts, and any one of them ends the work."""
    files = [AnswerFile(tmp_path / "answers.jsonl", PROMPTS, part=rank) for rank in range(2)]
    for number in range(5):
        files[number % 2].add(number, text=str(number))
    assert [file.missing for file in files] == [[0, 1, 2, 3, 4]] * 2
    files[0].finish()
    assert [line["text"] for line in lines(tmp_path / "answers.jsonl")] == list("01234")
    assert len(list(tmp_path.iterdir())) == 1


def test_errors_are_lines_that_are_tried_again(tmp_path):
    file = answered(tmp_path / "answers.jsonl", PROMPTS, [0, 1, 3])
    file.add(2, error="no luck")
    file.add(4, error="no luck")
    file.finish()
    again = AnswerFile(tmp_path / "answers.jsonl", PROMPTS)
    assert again.missing == [2, 4] and lines(again.path)[2]["error"] == "no luck"
    again.add(2, text="luck")
    again.add(4, error="none again")
    again.finish()
    assert lines(again.path)[2]["text"] == "luck" and lines(again.path)[4]["error"] == "none again"


def test_nothing_is_finished_before_its_time(tmp_path):
    with pytest.raises(SpeculationError, match="3 of 5 prompts have no answer yet, the first is number 1"):
        answered(tmp_path / "answers.jsonl", PROMPTS, [0, 2]).finish()


def test_answers_of_another_kind_are_not_touched(tmp_path):
    path = tmp_path / "answers.jsonl"
    answered(path, PROMPTS, range(5), settings={"seed": 0}).finish()
    before = path.read_bytes()
    for prompts, settings in ((PROMPTS, {"seed": 1}), (PROMPTS[:2], {"seed": 0})):
        with pytest.raises(SpeculationError, match="answer none of these"):
            AnswerFile(path, prompts, settings)
    assert path.read_bytes() == before
    for content in ("a text\n", '{"prompt": "a"}\n', "[1]\n"):
        path.write_text(content)
        with pytest.raises(SpeculationError, match="something else than answers"):
            AnswerFile(path, PROMPTS)
    with pytest.raises(SpeculationError, match="folder"):
        AnswerFile(tmp_path, PROMPTS)
    with pytest.raises(SpeculationError, match="JSON values"):
        AnswerFile(tmp_path / "new.jsonl", [object()])


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def pair():
    target, draft = (
        load_model(TargetSettings(target=str(PAIR / name), dtype="float32")) for name in ("target", "draft")
    )
    tokenizer = load_tokenizer(TargetSettings(target=str(PAIR / "target")))
    tokenizer.chat_template = TEMPLATE
    return Pair(tokenizer, target, draft)


@pytest.fixture
def asked(pair, tmp_path, monkeypatch):
    """Settings for these prompts; each call answers them anew, or goes on."""
    monkeypatch.setattr(GenerateSettings, "load", lambda _: pair)

    def settings(prompts=PROMPTS, many=True, **changes):
        source = tmp_path / "prompts.jsonl"
        rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = {"target": "pair", "dtype": "float32", "drafter": "draft_model:num_draft_tokens=3", "max_new_tokens": 12}
        return GenerateSettings(
            **told | {"prompts": str(source) if many else None, "output": tmp_path / "answers.jsonl"} | changes
        )

    return settings


def plain(pair, prompt, new=12):
    ids = pair.tokenizer(prompt, return_tensors="pt")["input_ids"] if isinstance(prompt, str) else prompt
    output = pair.target.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=pair.tokenizer.pad_token_id)
    return pair.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("max_rows", [1, 3])
def test_the_answers_are_plain_decodings(pair, asked, max_rows, tmp_path):
    assert run_generate(asked(max_rows=max_rows)) == 0
    found = lines(tmp_path / "answers.jsonl")
    assert [line["prompt"] for line in found] == PROMPTS
    assert [line["text"] for line in found] == [plain(pair, prompt) for prompt in PROMPTS]
    for line in found:
        assert line["stats"]["emitted_tokens"] == 12 and line["stats"]["drafted_tokens"] > 0
        assert line["finish_reason"] == "length"


def test_a_rerun_answers_what_is_missing_only(pair, asked, tmp_path, monkeypatch):
    run_generate(asked())
    path = tmp_path / "answers.jsonl"
    whole, kept = path.read_bytes(), path.read_bytes().splitlines(keepends=True)
    path.unlink()
    (tmp_path / "answers.jsonl.part").write_bytes(kept[3] + kept[0] + kept[1][:-20])
    met, fields = [], many.Answering.fields
    monkeypatch.setattr(many.Answering, "fields", lambda self, *a, **o: met.append(a[0]) or fields(self, *a, **o))
    assert run_generate(asked()) == 0 and len(met) == 3
    assert [line["text"] for line in lines(path)] == [json.loads(line)["text"] for line in whole.splitlines()]
    monkeypatch.setattr(GenerateSettings, "load", lambda _: pytest.fail("nothing is missing"))
    assert run_generate(asked()) == 0


def test_samples_of_a_seed_are_the_same_wherever_a_run_was_stopped(pair, asked, tmp_path):
    """Of two equal prompts each has its own."""
    path, texts = tmp_path / "answers.jsonl", []
    for seed, max_rows in ((0, 3), (0, 1), (1, 1)):
        path.unlink(missing_ok=True)
        run_generate(asked(temperature=1.0, seed=seed, drafter="prompt_lookup", max_rows=max_rows))
        texts.append([line["text"] for line in lines(path)])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][2]


def test_conversations_are_played_turn_by_turn(pair, asked, tmp_path):
    run_generate(asked([{"turns": ["What is 2 + 2?", "And 3 + 3?"]}]))
    (line,) = lines(tmp_path / "answers.jsonl")
    assert line["prompt"] == [{"role": "user", "content": text} for text in ("What is 2 + 2?", "And 3 + 3?")]
    prompt, texts = Prompt(("What is 2 + 2?", "And 3 + 3?"), chat=True), []

    while prompt.turns:
        texts.append(plain(pair, torch.tensor([prompt_ids(pair.tokenizer, prompt)])))
        prompt = prompt.after(texts[-1])
    assert line["texts"] == texts and line["text"] == texts[1]
    assert line["stats"]["emitted_tokens"] == 24


@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_prompt_that_fails_says_so_in_its_line(pair, asked, tmp_path, max_rows, capsys):
    long = "def add(a, b): " * 400
    assert run_generate(asked([*PROMPTS, long, "last"], max_rows=max_rows)) == (max_rows > 1)
    if max_rows > 1:  # generate itself goes on past the positions
        found = lines(tmp_path / "answers.jsonl")
        assert [name for name, line in enumerate(found) if "error" in line] == [5]
        assert "positions" in found[5]["error"] and "6 of 7" in capsys.readouterr().out
        assert found[6]["text"] == plain(pair, "last")


@pytest.mark.parametrize("max_rows", [1, 3])
def test_an_interrupted_run_says_how_to_go_on(pair, asked, tmp_path, capsys, monkeypatch, max_rows):
    add, met = AnswerFile.add, []

    def interrupted(file, number, **fields):
        if met:
            raise KeyboardInterrupt
        add(file, number, **fields)
        met.append(number)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", interrupted)
        assert run_generate(asked(max_rows=max_rows)) == 130
    assert "run the same command again" in capsys.readouterr().out
    assert len(lines(tmp_path / "answers.jsonl.part")) == 1
    assert run_generate(asked(max_rows=max_rows)) == 0 and len(lines(tmp_path / "answers.jsonl")) == len(PROMPTS)


def test_what_fails_for_all_ends_the_run(pair, asked, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("the device is\nlost")

    monkeypatch.setattr(many.Answering, "_decode", broken)
    with pytest.raises(SpeculationError, match=r"8 prompts in a row fail alike: the device is lost"):
        run_generate(asked([f"prompt {i}" for i in range(100)], max_rows=2))
    assert len(lines(tmp_path / "answers.jsonl.part")) == 8


def test_where_few_are_left_and_all_fail_the_file_is_written(asked, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("too long")

    monkeypatch.setattr(many.Answering, "_decode", broken)
    for _ in range(2):
        assert run_generate(asked(PROMPTS[:2])) == many.FAILED
        assert ["too long" in line["error"] for line in lines(tmp_path / "answers.jsonl")] == [True, True]


def test_drafters_that_cannot_join_decode_one_prompt_after_the_other(pair, asked, tmp_path, capsys):
    assert run_generate(asked(PROMPTS[:2], drafter="pearl")) == 0
    assert [line["text"] for line in lines(tmp_path / "answers.jsonl")] == [plain(pair, p) for p in PROMPTS[:2]]
    assert "one by one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"output": None}, "output"),
        ({"many": False, "prompt": "Hello"}, "prompts"),
        ({"prompt": "Hello"}, "prompt"),
        ({"chat": True}, "chat"),
        ({"compare": True}, "compare"),
        ({"max_rows": 0}, "max_rows"),
        ({"limit": 0}, "limit"),
    ],
)
def test_settings_that_do_not_go_together(asked, wrong, named):
    with pytest.raises(SpeculationError, match=named):
        run_generate(asked(**wrong))


def test_every_row_of_a_source_is_a_prompt(tmp_path):
    source = tmp_path / "prompts.txt"
    source.write_text("one\ntwo\none\n\nthree\n")
    assert [prompt.said for prompt in all_prompts(source)] == ["one", "two", "one", "three"]
    assert len(all_prompts(source, 2)) == 2 and len(load_prompts(source)) == 3
    source.write_text("\n")
    with pytest.raises(SpeculationError, match="holds no prompt"):
        all_prompts(source)


@pytest.mark.real_time
def test_a_killed_run_goes_on(tmp_path, pair):
    """The command itself, killed with no chance to clean up."""
    prompts = [f"def f{i}(a, b):" for i in range(12)]
    source, path = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join(prompts))
    command = [sys.executable, "-c", "from hf_specdec_cli import app; app()", "generate", "--target"]
    command += [str(PAIR / "target"), "--dtype", "float32", "--threads", "1", "--max-rows", "2"]
    command += ["--max-new-tokens", "48", "--prompts", str(source), "--output", str(path)]
    part = tmp_path / "answers.jsonl.part"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (part.exists() and part.read_bytes().count(b"\n") >= 2) or process.poll() is not None, 120)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    held = part.read_bytes().splitlines()
    assert 2 <= len(held) < 12 and not path.exists()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert [line["text"] for line in lines(path)] == [plain(pair, prompt, 48) for prompt in prompts]
    assert json.loads(held[0]) in lines(path)
