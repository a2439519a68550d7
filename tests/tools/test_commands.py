"""The command line: help before anything is loaded, options out of settings, one line for what is wrong."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from typer import Option
from typer.main import get_command
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.commands.options import command, expanded
from hf_specdec.drafters.disco import DiscoConfig
from hf_specdec.errors import SpeculationError
from hf_specdec.options import help_of, range_of
from hf_specdec_cli import COMMANDS

SEEN = """
import sys
from typer.testing import CliRunner
from hf_specdec_cli import app
result = CliRunner().invoke(app, sys.argv[1:])
assert result.exit_code == 0, result.output
print([name for name in ("torch", "transformers", "hf_specdec") if name in sys.modules], result.output)
"""


@pytest.mark.fresh_python
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], [words.split()[0] for words in COMMANDS]), (["train", "--help"], ["disco", "ngram"])],
)
def test_help_loads_nothing(arguments: list[str], words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SEEN, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ") and all(word in done.stdout for word in words)


@pytest.mark.fresh_python
def test_the_version_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ") and hf_specdec.__version__ in done.stdout


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_tells_its_options(words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and COMMANDS[words] in result.output
    found: Any = get_command(app)
    for word in words.split():
        found = found.commands[word]
    options = found.make_context(word, [], resilient_parsing=True).command.params
    assert options and all(option.help for option in options)


def test_a_training_command_says_of_an_option_what_its_config_says() -> None:
    result = CliRunner().invoke(app, ["train", "disco", "--help"], env={"COLUMNS": "200"})
    assert "How many of the draft's top probabilities the classifier sees (1 to 1024)." in result.output
    assert help_of(DiscoConfig, "k") in result.output and range_of(DiscoConfig, "k") == (1, 1024)


@dataclass(kw_only=True)
class Settings:
    name: Annotated[str, Option(help="who")]
    sizes: Annotated[list[int], Option("--size", help="several")] = field(default_factory=lambda: [1])
    loud: bool = False


def test_fields_become_options() -> None:
    got = []

    def run(settings: Settings, path: Annotated[str, Option()], times: int = 2) -> None:
        got.append((settings, path, times))

    told = command(run, "run", "Runs.")
    assert [option.name for option in told.params] == ["name", "path", "sizes", "loud", "times"]
    told(["--name", "a", "--path", "b", "--size", "3", "--size", "4", "--loud"], standalone_mode=False)
    told(["--name", "a", "--path", "b"], standalone_mode=False)
    expanded(run)("a", "b", loud=True)
    assert got == [
        (Settings(name="a", sizes=[3, 4], loud=True), "b", 2),
        (Settings(name="a"), "b", 2),
        (Settings(name="a", loud=True), "b", 2),
    ]


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise SpeculationError("size must be 1 or more, got 0")

    with pytest.raises(SystemExit) as end:
        command(run, "run", "Runs.")([])
    assert end.value.code == 2 and capsys.readouterr().err == "error: size must be 1 or more, got 0\n"
