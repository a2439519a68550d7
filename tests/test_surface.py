"""What a Python user sees: imports that cost little, and names that an editor completes."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch

import hf_specdec
from hf_specdec.training.draft.cutting import cut

ROOT = Path(__file__).parent.parent

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
