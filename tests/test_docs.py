"""Every Python block of the documents and the notebook runs, in order, page by page, as if from the root."""

import doctest
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import registry

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    """Scripts for a launcher are marked ```py; tests/test_pearl_ranks.py runs them."""
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


WHOLE = ["README.md", "docs/index.md", "docs/how-it-works.md", "docs/add-a-drafter.md", "docs/notebook.ipynb"]
"""pages that make all that they use"""
PARTS = [
    page
    for folder in ("drafters", "guides")
    for page in sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / folder).glob("*.md"))
    if "from_pretrained(" not in "".join(blocks(page))
]
"""pages whose blocks start from a loaded `model`, `draft_model`, `tokenizer` and `inputs`, and ask for no repo"""


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, tmp_path):
    """Documents speak of paths from the root; what they save and register is not left behind.

    A small pair stands for the real model, which would have to be fetched, and for what is made for it.
    """
    for path in ROOT.iterdir():
        if path.name != "hub_configs":
            (tmp_path / path.name).symlink_to(path)
    pair, made = ROOT / "tests" / "pair", tmp_path / "hub_configs"
    draft = made / "draft_model" / "draft_model"
    draft.mkdir(parents=True)
    for path in (pair / "draft").iterdir():
        if "token" not in path.name:  # the ready one has none of its own
            (draft / path.name).symlink_to(path)
    (made / "hybrid").symlink_to(pair / "hybrid")
    real = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    real.mkdir(parents=True)
    for path in (pair / "target").iterdir():
        (real / path.name).symlink_to(path)
    (real / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "smollm2").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_drafters", dict(registry._drafters))


@pytest.mark.parametrize("page", WHOLE)
def test_a_page_runs_as_printed(page):
    run(page, {})


@pytest.mark.parametrize("page", PARTS)
def test_a_drafters_page_runs_on_a_loaded_pair(page):
    tokenizer = AutoTokenizer.from_pretrained("tests/pair/target", padding_side="left")
    model, draft_model = (
        AutoModelForCausalLM.from_pretrained(f"tests/pair/{name}", dtype=torch.float32) for name in ("target", "draft")
    )
    tokenizer.chat_template = TEMPLATE
    model.generation_config.max_new_tokens = 16
    inputs = tokenizer("def add(a, b):", return_tensors="pt")
    run(page, {"model": model, "draft_model": draft_model, "tokenizer": tokenizer, "inputs": inputs})


def run(page: str, names: dict) -> None:
    names["__name__"] = "__main__"
    for number, block in enumerate(blocks(page), start=1):
        where = f"{page}, block {number}"
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, names, where, page, 0)
            assert doctest.DocTestRunner().run(test).failed == 0, where
            names.update(test.globs)
        else:
            exec(compile(block, where, "exec"), names)


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/notebook.ipynb", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))],
)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_the_notebook_is_stored_without_outputs():
    """Times of another machine would be read as promises."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_reference_has_every_public_name():
    lines = (ROOT / "docs/reference.md").read_text().splitlines()
    assert [name for name in hf_specdec.__all__ if f"::: hf_specdec.{name}" not in lines] == []


def test_the_house_names_every_file():
    """By its folder, then its name: floors are told one after the other."""
    page = (ROOT / "docs/house.md").read_text().split("## The floors")[1]
    for path in sorted((ROOT / "hf_specdec").rglob("*.py")):
        folders = path.relative_to(ROOT / "hf_specdec").parts[:-1]
        if path.name != "__init__.py":
            rest = page
            for folder in folders:
                assert f"`{folder}/`" in rest, path
                rest = rest.split(f"`{folder}/`", 1)[1]
            assert f"`{path.name}`" in rest, path
