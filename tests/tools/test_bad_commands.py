"""Bad input on the command line: one line that names it, and no traceback; before the work begins, not after it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
from typer.testing import CliRunner

from hf_specdec import PromptLookupDrafter, SpeculationError
from hf_specdec.cli import app
from hf_specdec.hub import push
from hf_specdec.train import ngram

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, prompts, and files of other kinds."""
    folder = tmp_path_factory.mktemp("files")
    for name, layers in (("target", 2), ("draft", 1)):
        models.llama(num_hidden_layers=layers).save_pretrained(folder / name)
        models.tokenizer().save_pretrained(folder / name)
    (folder / "data.txt").write_text("abc\nbca\ncab\nfed\n")
    (folder / "empty.txt").write_text("\n")
    (folder / "bytes.txt").write_bytes(b"abc\n\xff\xfe\n")
    (folder / "broken.jsonl").write_text('{"prompt": "abc"}\n{\n')
    (folder / "drafter").mkdir()
    PromptLookupDrafter().save_pretrained(folder / "drafter")
    return folder


COMMANDS = {
    "generate": "--target target --prompt abc --dtype float32 --max-new-tokens 4",
    "explain": "--target target --prompt abc --dtype float32 --max-new-tokens 4",
    "bench": "--target target --prompts data.txt --dtype float32 --max-new-tokens 4 --repeats 1 --json results.json",
    "train disco": "--target target --draft draft --data data.txt --output out --dtype float32 --max-new-tokens 4",
    "train ngram": "--tokenizer target --data data.txt --output out",
    "push": "--repo-id org/name",
    "demo": "",
}
CASES = [
    *((command, ["--prompt", ""], "prompt must hold") for command in ("generate", "explain")),
    *((command, ["--prompt", " \n"], "prompt must hold") for command in ("generate", "explain")),
    *((command, ["--prompt", "xyz"], "no token") for command in ("generate", "explain")),
    *((command, ["--max-new-tokens", "0"], "max_new_tokens") for command in ("generate", "explain", "bench")),
    *((command, ["--max-new-tokens", "-3"], "max_new_tokens") for command in ("generate", "explain", "train disco")),
    *((command, ["--temperature", "-1"], "must be 0 or more") for command in ("generate", "explain", "bench")),
    *((command, ["--temperature", "nan"], "must be 0 or more") for command in ("generate", "explain", "bench")),
    *((command, ["--seed", "-1"], "seed must be") for command in ("generate", "explain", "bench", "train disco")),
    ("explain", ["--output", "data.txt/page.html"], "output 'data.txt'"),
    ("explain", ["--html", "data.txt/page.html"], "output 'data.txt'"),  # the option's old name
    ("explain", ["--output", "page.txt"], "page.txt"),
    ("demo", ["--output", "data.txt/picture.svg"], "output 'data.txt'"),
    ("demo", ["--output", "target"], "output 'target' is a folder"),
    ("demo", ["--svg", "data.txt/picture.svg"], "output 'data.txt'"),
    ("bench", ["--output", "data.txt/results.json"], "data.txt"),
    ("bench", ["--prompts", "nowhere.txt"], "nowhere.txt"),
    ("train disco", ["--data", "nowhere.txt"], "nowhere.txt"),
    ("train disco", ["--validation", "nowhere.txt"], "nowhere.txt"),
    ("train disco", ["--limit", "0"], "limit must be 1"),
    ("train disco", ["--output", "data.txt"], "output 'data.txt'"),
    ("train ngram", ["--data", "nowhere.txt"], "nowhere.txt"),
    ("train ngram", ["--data", "target"], "cannot read target"),
    ("train ngram", ["--data", "bytes.txt"], "UTF-8"),
    ("train ngram", ["--data", "broken.jsonl"], "broken.jsonl, line 2 is not JSON"),
    ("train ngram", ["--output", "data.txt/out"], "output 'data.txt/out'"),
    ("push", ["nowhere"], "nowhere"),
    ("push", ["drafter"], "connection"),
]


@pytest.mark.parametrize(
    ("command", "more", "word"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_one_line_says_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, more: list[str], word: str
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [*command.split(), *COMMANDS[command].split(), *more])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and word in last
    assert not (folder / "results.json").exists() and not (folder / "out" / "training.json").exists()


class UnknownHostError(Exception):
    """Of whatever library carries the requests."""


def test_a_push_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise UnknownHostError("[Errno -2] Name or service not known")

    monkeypatch.setattr(push.HfApi, "create_repo", fails)
    with pytest.raises(SpeculationError, match=r"connection.*Name or service not known"):
        PromptLookupDrafter().push_to_hub("org/name")


def test_saving_to_where_nothing_can_be_written(folder: Path) -> None:
    with pytest.raises(SpeculationError, match="cannot write to folder"):
        PromptLookupDrafter().save_pretrained(folder / "data.txt" / "drafter")


def test_ctrl_c_in_a_training_says_that_nothing_was_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ngram, "train_ngram", interrupted)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["train", "ngram", *COMMANDS["train ngram"].split()])
    assert result.exit_code in (1, 130) and "the same command starts from the beginning" in result.output
    assert "Traceback" not in result.output


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_specdec.cli", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "Usage: hf-specdec" in done.stdout and "bench" in done.stdout
