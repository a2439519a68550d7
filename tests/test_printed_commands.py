"""Every command of README and documents: its options are known, what it names is there, and its small form runs."""

import re
import runpy
import shlex
import sys
import tomllib
from itertools import pairwise
from typing import Any

import pytest
import torch
import typer
from printed import PAGES, ROOT, ROWS, commands, data_sets, stand_ins
from stream_models import streams_of
from transformers import AutoModelForCausalLM

import hf_specdec_cli
from hf_specdec.tools.loading.rows import SETS


def words_of(command: str) -> list[str]:
    """Without variables that are set before it, and without the virtual environment's folder."""
    words = shlex.split(re.sub(r"\$\(.*?\)", "SHELL", command), comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


PRINTED = [(page, command) for page in PAGES for command in commands(page) if words_of(command)]
SMALL = {
    "limit": 1,
    "max-new-tokens": 12,
    "repeats": 1,
    "requests": 4,
    "own-prompts": 0,
    "num-layers": 2,
    "timed-prompts": 1,
    "epochs": 1,
    "threads": 1,
}
"""options of a small form, where a command has them"""
TRAINED = {"limit": 8}
"""what a training needs more of"""
TARGETS = ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "tests/pair/target")
"""what a clone has, or a stand-in for it"""
ELSEWHERE = ("serve", "push", "export", "demo")
"""what goes on until it is stopped, needs the network, or the real model; other tests run them"""


def ours(words: list[str]) -> tuple[Any, list[str]] | None:
    """A command of this package or of its laboratory, and its arguments; None for others."""
    if words[0] == "hf-specdec":
        return typer.main.get_command(hf_specdec_cli.app), words[1:]
    if words[0] == "python" and words[1].startswith("docs/laboratory/"):
        return laboratory(words[1]), words[2:]
    return None


def laboratory(script: str) -> Any:
    """The command that a script would run."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.core.TyperCommand, "main", lambda self, *args, **options: found.append(self))
        patch.syspath_prepend(str(ROOT / "docs" / "laboratory"))
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return found[0]


def parsed(command: Any, arguments: list[str]) -> Any:
    """The context of the command behind its groups, its arguments read and checked."""
    while hasattr(command, "commands"):
        assert arguments[0] in command.commands, f"no such command: {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command.make_context(command.name, list(arguments))


@pytest.mark.parametrize(("page", "command"), PRINTED)
def test_a_printed_command_is_known(page, command):
    words, text = words_of(command), (ROOT / page).read_text()
    try:
        found = ours(words)
    except ModuleNotFoundError as error:  # of a library that only this script needs
        assert str(error.name).replace("_", "-") in text, f"{page} does not say how to install {error.name}"
        return
    if found:
        parsed(*found)
        for value in sources(words):
            assert value in SETS or value.partition(":")[0] in ROWS or value in made_before(page), (
                f"where does a reader get {value}?"
            )
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"(?:\.|hf-specdec)\[(.*?)\]", command):
            assert set(extra.split(",")) <= extras.keys(), extra
    elif words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
    elif words[0] not in ("source", "git", "pytest", "curl", "torchrun", "accelerate", "pip", "ruff", "mypy", "mkdocs"):
        assert words[0] in ("python", "python3"), f"what is {words[0]}?"
    for word in words:
        if re.match(r"(hub_configs|docs|tests|hf_specdec)/", word) and word not in made_before(page):
            assert (ROOT / word.split("::")[0]).exists(), f"there is no {word}"


def sources(words: list[str]) -> list[str]:
    """Values of the options that name prompts or texts."""
    pairs = pairwise(words)
    return [value for option, value in pairs if option in ("--prompts", "--data", "--train", "--test", "--validation")]


def made_before(page: str) -> set[str]:
    """What commands of a page write, or the page shows the reader to write."""
    text = (ROOT / page).read_text()
    return {*re.findall(r"--output (\S+)", text), *re.findall(r"^ *# (\S+\.jsonl)", text, flags=re.MULTILINE)}


def small(arguments: list[str], known: set[str], sizes: dict[str, int]) -> list[str]:
    """Arguments with other sizes, one source of prompts, and without packing, which not every CPU can do.

    Args:
        known: options of the command.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.removeprefix("--") in sizes or (word == "--prompts" and "--prompts" in kept):
            next(words)
        elif word != "--pack-linear":
            kept.append(word)
    return kept + [part for name, value in sizes.items() if f"--{name}" in known for part in (f"--{name}", str(value))]


def runs_here(command: str) -> bool:
    """Whether it ends by itself, and reads nothing that a script of the laboratory has to make."""
    words = words_of(command)
    if words[0] != "hf-specdec" or words[1] in ELSEWHERE or {"--help", "--chat", "--server"} & set(words):
        return False
    return "--target" not in words or words[words.index("--target") + 1] in TARGETS


RUN = {page: [command for other, command in PRINTED if other == page and runs_here(command)] for page in PAGES}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    stand_ins(tmp_path)
    data_sets(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    streams_of(target).save_pretrained(str(tmp_path / "hub_configs" / "streaming"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["hf-specdec"])
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.grid
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_the_commands_of_a_page_run_in_their_small_form(page, clone):
    """One after the other: some read what another has written."""
    for command in RUN[page]:
        one, arguments = ours(words_of(command))
        known = {option for parameter in parsed(one, arguments).command.params for option in parameter.opts}
        sizes = SMALL | (TRAINED if arguments[0] == "train" else {})
        with parsed(one, small(arguments, known, sizes)) as context:
            try:
                context.command.invoke(context)
            except typer.Exit as end:
                assert end.exit_code == 0, command
