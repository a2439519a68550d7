"""What a Python user sees: imports that cost little, and names that an editor completes."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import models
import pytest
import torch

import hf_specdec
from hf_specdec import Drafter, SpeculationError
from hf_specdec.hub import load_drafter
from hf_specdec.hub.cards import CardInfo
from hf_specdec.hub.draft import load_draft
from hf_specdec.hub.files import HubSource
from hf_specdec.hub.loading import DRAFT_OPTIONS
from hf_specdec.hub.push import Upload
from hf_specdec.hub.registry import drafter_class, drafter_types
from hf_specdec.hub.saving import write_drafter
from hf_specdec.train.draft.cutting import cut

ROOT = Path(__file__).parents[2]

IMPORTS = """
import json, sys
from transformers.generation import GenerationMixin
before = set(sys.modules)
import hf_specdec
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.fresh_python
def test_the_package_imports_little_beside_transformers_generation() -> None:
    """Models and auto classes take half as long again as transformers.generation, and wait until they are used."""
    names = json.loads(run(IMPORTS))
    others = [name for name in names if name.split(".")[0] != "hf_specdec"]
    assert len(others) < 10, others
    assert not [name for name in others if name.startswith("transformers.m")], others
    assert "hf_specdec.drafters.draft_model.cut" not in names


def test_the_package_offers_its_public_names_only() -> None:
    assert dir(hf_specdec) == sorted(hf_specdec.__all__)
    assert all(hasattr(hf_specdec, name) for name in hf_specdec.__all__)


LOADS = """
import hf_specdec
from transformers import AutoConfig, AutoModelForCausalLM
print(type({load}).__name__)
"""


@pytest.mark.grid
@pytest.mark.parametrize(
    ("load", "name"),
    [
        ("AutoConfig.from_pretrained({folder!r})", "CutLlamaConfig"),
        ("AutoModelForCausalLM.from_pretrained({folder!r})", "CutLlamaForCausalLM"),
    ],
)
def test_a_cut_draft_is_known_to_the_auto_classes(tmp_path: Path, load: str, name: str) -> None:
    cut(models.llama(), [0], torch.arange(50)).save_pretrained(tmp_path)
    assert run(LOADS.format(load=load.format(folder=str(tmp_path)))).split() == [name]


NAMES = drafter_types()


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("name", NAMES)
def test_a_constructors_signature_has_the_options_of_its_config(name: str) -> None:
    made, config = drafter_class(name), drafter_class(name).config_class
    assert keywords(made) == {option: getattr(config(), option) for option in config.options()}
    parameters = inspect.signature(made).parameters.values()
    assert not [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    hints = {p.name: p.annotation for p in parameters}
    assert all(hints[field.name] == field.type for field in config.fields())


@pytest.mark.parametrize("name", NAMES)
def test_a_class_says_what_its_options_mean_and_how_far_they_go(name: str) -> None:
    text = inspect.getdoc(drafter_class(name)) or ""
    entries = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, flags=re.MULTILINE))
    options = drafter_class(name).config_class.fields()
    assert list(entries) == [option.name for option in sorted(options, key=lambda option: option.metadata["trained"])]
    for option in options:
        entry = " ".join(entries[option.name].split())
        assert option.metadata["help"] and entry.startswith(option.metadata["help"])
        if "range" in option.metadata:
            assert "{} to {}; ".format(*option.metadata["range"]) in entry
        words = get_args(option.type) if get_origin(option.type) is Literal else []
        assert all(f'"{word}"' in entry for word in words)


def test_a_constructor_may_name_options_of_its_own() -> None:
    class Brief(hf_specdec.PromptLookupDrafter):
        """Copies little."""

        def __init__(self, times: int, *, max_match: int = 2, **options: Any) -> None:
            super().__init__(max_match=max_match * times, **options)

    assert list(inspect.signature(Brief).parameters)[:2] == ["times", "max_match"]
    assert keywords(Brief) == keywords(hf_specdec.PromptLookupDrafter) | {"max_match": 2}
    assert (inspect.getdoc(Brief) or "").startswith("Copies little.\n\nOptions:\n    max_draft_tokens: ")
    assert (
        Brief(2, num_branches=3).config.chosen()
        == hf_specdec.PromptLookupDrafter(max_match=4, num_branches=3).config.chosen()
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_like_any_other(name: str) -> None:
    made, known = drafter_class(name), drafter_class(name).config_class.options()
    with pytest.raises(SpeculationError, match=rf"unknown option 'gama'.*{known[0] if known else 'none'}"):
        made(*[None] * made.needs_draft_model, gama=3)


def test_from_pretrained_names_what_can_be_said() -> None:
    text = inspect.getdoc(Drafter.from_pretrained) or ""
    named = {field.name for field in dataclasses.fields(HubSource)} | set(keywords(load_draft))
    assert all(f"`{name}`" in text or f"{name}:" in text for name in named | set(keywords(Drafter.from_pretrained)))
    assert set(DRAFT_OPTIONS) == set(keywords(load_draft))
    assert keywords(Drafter.from_pretrained) == keywords(load_drafter)
    assert hf_specdec.SuffixDrafter.from_pretrained.__func__ is Drafter.from_pretrained.__func__


def test_saving_and_pushing_name_what_can_be_said() -> None:
    text = inspect.getdoc(Drafter.save_pretrained) or ""
    upload = {field.name for field in dataclasses.fields(Upload)}
    assert all(f"`{name}`" in text for name in {*keywords(write_drafter), *CardInfo.__annotations__, *upload})
    assert all(f"{name}:" in text for name in keywords(Drafter.save_pretrained))


@pytest.mark.parametrize("call", ["save", "push"])
def test_an_unknown_argument_of_a_save_is_refused(call: str, tmp_path: Path) -> None:
    drafter: Any = hf_specdec.PromptLookupDrafter()
    with pytest.raises(SpeculationError, match=r"unknown argument 'licence' \(did you mean 'license'\?\)"):
        drafter.save_pretrained(tmp_path, licence="mit") if call == "save" else drafter.push_to_hub(
            "a/b", licence="mit"
        )
    assert list(tmp_path.iterdir()) == []


def test_an_upload_needs_to_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SpeculationError, match="repo_id, private, create_pr needs push_to_hub=True"):
        hf_specdec.PromptLookupDrafter().save_pretrained(tmp_path, repo_id="a/b", private=False, create_pr=True)
    assert list(tmp_path.iterdir()) == []
