"""Every Python block of the documents and the notebook runs, in order, page by page, as if from the root.

Tables of options are written by a test: `WRITE_DOCS=1 pytest tests/test_docs.py -k options`.
"""

import doctest
import inspect
import json
import os
import re

import pytest
import torch
from printed import PAGES, ROOT, TEMPLATE, commands, snippets, stand_ins
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.hub import registry
from hf_specdec.options import as_written, default_of, is_trained, values_of

WHOLE = [
    "README.md",
    "docs/index.md",
    "docs/get-started.md",
    "docs/how-it-works.md",
    "docs/contributing.md",
    "docs/reference.md",
    "docs/notebook.ipynb",
]
"""pages that make all that they use"""
PARTS = [
    page
    for page in PAGES
    if page.startswith(("docs/drafters/", "docs/guides/", "docs/models", "docs/which"))
    and "from_pretrained(" not in "".join(snippets(page))
]
"""pages whose blocks start from a loaded `model`, `draft_model`, `tokenizer` and `inputs`, and ask for no repo"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, tmp_path):
    """Documents speak of paths from the root; what they save and register is not left behind."""
    stand_ins(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_drafters", dict(registry._drafters))


@pytest.mark.parametrize("page", WHOLE)
def test_a_page_runs_as_printed(page):
    run(page, {})


@pytest.mark.parametrize("page", PARTS)
def test_a_drafters_page_runs_on_a_loaded_pair(page):
    if page == "docs/guides/tools.md":
        pytest.importorskip("xgrammar")
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
    for number, block in enumerate(snippets(page), start=1):
        where = f"{page}, block {number}"
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, names, where, page, 0)
            assert doctest.DocTestRunner().run(test).failed == 0, where
            names.update(test.globs)
        else:
            exec(compile(block, where, "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, "docs/notebook.ipynb"])
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_no_figures_without_a_command(page):
    """A table of measured figures stands in a section, or on a page, that prints what measured them."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    measured = [row for row in text.splitlines() if row.startswith("|") and len(re.findall(r"\d\.\d", row)) > 1]
    assert not measured or commands(page), f"{page} has figures and no command: {measured[0]}"


OPTIONS = re.compile(r"^<!-- options of ([\w, ]+) -->\n\n((?:\|.*\n)*)", re.MULTILINE)


def options_table(kinds: list[str]) -> str:
    """The options that users may set, without those that a drafter shares with the one that its config builds on."""
    lines = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for kind in kinds:
        config = registry.drafter_class(kind).config_class
        for option in config.fields():
            if option.name in inspect.get_annotations(config) and not is_trained(option):
                name = f"`{option.name}`" + f" of `{kind}`" * (len(kinds) > 1)
                values = ", ".join(f"`{value}`" if '"' in value else value for value in values_of(option).split(", "))
                meaning = re.sub(r'"\w+"', r"`\g<0>`", option.metadata["help"])
                lines.append(f"| {name} | `{as_written(default_of(option))}` | {values} | {meaning} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_tables_of_options_are_what_the_configs_say():
    described = []

    def table(mark: re.Match[str]) -> str:
        described.extend(kinds := mark[1].split(", "))
        return f"<!-- options of {mark[1]} -->\n\n{options_table(kinds)}"

    for path in [ROOT / page for page in PAGES]:
        text = OPTIONS.sub(table, path.read_text())
        if os.environ.get("WRITE_DOCS"):
            path.write_text(text)
        assert text == path.read_text(), path
    assert sorted(described) == [
        kind for kind in registry.drafter_types() if registry.drafter_class(kind).config_class.options()
    ]


def test_no_page_waits_for_a_table():
    assert [page for page in PAGES if "<!-- TABLE" in (ROOT / page).read_text()] == []


def test_the_notebook_is_stored_without_outputs():
    """Times of another machine would be read as promises."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_reference_has_every_public_name():
    lines = (ROOT / "docs/reference.md").read_text().splitlines()
    assert [name for name in hf_specdec.__all__ if f"::: hf_specdec.{name}" not in lines] == []


def test_the_house_names_every_room_and_only_what_is_there():
    """In the page that says where things are: rooms and files by their path, what all share by its name."""
    package = ROOT / "hf_specdec"
    house = (ROOT / "docs" / "contributing.md").read_text()
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(re.findall(r"^\| `(\w+/)` \|", house, re.MULTILINE))
    assert not [path.name for path in package.glob("[a-z]*.py") if f"`{path.name}`" not in house]
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", house):
        assert any((folder / name).exists() for folder in (package, package / "tools", package / "train", ROOT)), name
