"""The package stands on floors: a module imports from the floors below its own, and from its own part of the package.

Imports for type checkers only count like any other.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_specdec"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
FLOORS = [
    {"errors", "version", "clock", "transfer", "files"},
    {"options"},
    {"theory", "config", "picker", "grammars"},
    {"budget"},
    {"stats"},
    {"protocol"},
    {"session", "target"},
    {"schedule"},
    {"hub", "verify"},
    {"drafters", "engine"},
    {"generate"},
    {"tools"},
    {""},  # the package itself: what users import
    {"train", "serve"},
    {"commands"},
    {"cli"},
]
"""from the ground up; parts of one floor do not know each other"""
OVER = {
    "auto": {"draft_model"},
    "disco": {"draft_model"},
    "pearl": {"draft_model"},
    "heads": {"draft_model"},
    "hybrid": {"draft_model", "suffix", "prompt_lookup", "heads"},
    "suffix": {"prompt_lookup"},
    "streaming": {"prompt_lookup"},
}
"""which families of drafters are built over which; `sources` is common to all, as the sessions are"""
LABORATORY = {"docs", *(file.stem for file in (ROOT / "docs" / "laboratory").glob("*.py"))}
"""modules that serve the package's documentation, and are no part of it"""


@cache
def imports() -> dict[str, set[str]]:
    """By module, which of the package's own it imports."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}


def part(module: str) -> str:
    """The package's part that a module lies in; "" for the package itself."""
    return [*module.split("."), ""][1]


def test_every_part_has_its_floor() -> None:
    listed = [name for floor in FLOORS for name in floor]
    assert sorted(listed) == sorted({part(module) for module in imports()})


def test_no_import_runs_up() -> None:
    height = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if part(module) != part(other) and height[part(other)] >= height[part(module)]
    ]
    assert not wrong


def test_no_circles() -> None:
    TopologicalSorter(imports()).prepare()  # raises where there is one


def test_drafters_know_only_what_they_are_built_over() -> None:
    path = ROOT / PACKAGE / "drafters"
    families = {folder.parent.name for folder in path.glob("*/__init__.py")} - {"sources"}
    assert set(OVER) <= families

    def family(module: str) -> str | None:
        names = module.split(".")
        return names[2] if names[1:2] == ["drafters"] and len(names) > 2 and names[2] in families else None

    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (mine := family(module)) and (theirs := family(other)) and theirs not in OVER.get(mine, set()) | {mine}
    ]
    assert not wrong
    common = {f"{PACKAGE}.drafters.{file.stem}" for file in path.glob("*.py")} - {f"{PACKAGE}.drafters.__init__"}
    assert not [f"{m} imports {o}" for m in common for o in imports()[m] if family(o)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    names = list(_imported(ast.parse(text)))
    assert not [name for name, _ in names if name.split(".")[0] in LABORATORY]
    assert not [name for name, inside in names if inside and name.split(".")[0] in ("", PACKAGE)]


def _imported(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """The names of imported modules ("." first where relative), and whether that is done inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), inside
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imported(node, inside or function)
