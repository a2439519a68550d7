"""How much the tests find: changes one expression of the package at a time and asks whether a test fails.

    python tests/mutations.py                # 60 mutations, as the default run would meet them
    python tests/mutations.py --seed 7 --number 10 --folder mutations

One run of all tests first says which of them pass each place (every test runs at full speed: a place only writes down
who passed it). Each mutation then meets those tests, quickest first, until one fails. Which places are taken depends
on the seed and on a place's own line, so that a change elsewhere leaves them where they are. Two processes at a time,
and less than an hour in all. What is there in `--folder` already is not done again.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ["engine", "verify", "budget", "target", "drafters", "generate"]
PASSED, TIMES = "passed.txt", "times.json"
LISTED = "MUTATIONS_TESTS"
"""names the file of tests that a run is to keep, in their order"""
HANGS = 120.0
"""seconds that a mutated run may take beside three times what its tests took: a test that hangs has found it"""

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OTHER = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One expression of one line, and what stands there instead. Offsets count bytes, as in `ast`."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"

    def put(self, text: str, instead: str) -> str:
        lines = text.encode().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + instead.encode() + line[self.end :]
        return b"".join(lines).decode()


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """Wrong expressions that could stand where `node` does."""
    match node:
        case ast.Compare(left, [operator], others) if type(operator) in SWAPPED:
            yield ast.Compare(left, [SWAPPED[type(operator)]()], others)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            yield ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(SWAPPED[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Call(ast.Name(name), arguments, keywords) if name in OTHER:
            yield ast.Call(ast.Name(OTHER[name]), arguments, keywords)


def within(function: ast.AST) -> Iterator[ast.AST]:
    """What runs when a function does: no types, defaults or formats, and nothing of a pattern."""
    left_out = (ast.JoinedStr, ast.arguments, ast.pattern, ast.FunctionDef, ast.AsyncFunctionDef, ast.Raise)
    for name, value in ast.iter_fields(function):
        for child in value if isinstance(value, list) else [value]:
            runs = name not in ("annotation", "returns", "decorator_list") and isinstance(child, ast.AST)
            if runs and not isinstance(child, left_out):
                yield child
                yield from within(child)


def mutations(folder: Path, seed: int) -> list[Mutation]:
    """One of each line that has any, in an order that the seed and the lines give."""
    found: dict[tuple[str, str], tuple[bytes, Mutation]] = {}
    for file in sorted(file for room in ROOMS for file in (folder / "hf_specdec" / room).rglob("*.py")):
        path, text = file.relative_to(folder).as_posix(), file.read_text()
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for node in (node for function in functions for node in within(function)):
            if not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
                continue
            line = text.splitlines()[node.lineno - 1].strip()
            place = path, node.lineno, node.col_offset, node.end_col_offset
            for other in changed(node):
                new = Mutation(*place, ast.unparse(node), f"({ast.unparse(other)})")
                rank = sha256(f"{seed} {path} {line} {new.before} {new.after}".encode()).digest()
                found[path, line] = min(found.get((path, line), (rank, new)), (rank, new), key=lambda pair: pair[0])
    return [mutation for _, mutation in sorted(found.values(), key=lambda pair: pair[0])]


def copied(folder: Path) -> Path:
    """A checkout as it stands, with what git does not know yet, to be changed at will."""
    shutil.rmtree(folder, ignore_errors=True)
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for file in files:
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
    return folder


def run(folder: Path, *arguments: str, seconds: float | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Runs pytest over a copy, whose package comes before the one that is installed."""
    path = os.pathsep.join([str(folder / "marks"), str(folder), str(folder / "tests")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "mutations", "-p", "no:cacheprovider", *arguments], cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
    )  # fmt: skip


MARKS = """
import builtins, os

seen = set()

def passed(place):
    who = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if who and (place, who) not in seen:
        seen.add((place, who))
        with open({file!r}, "a") as file:
            file.write(f"{{place}} {{who}}\\n")

builtins._mutations_passed = passed
"""


def who_passes(places: list[Mutation], folder: Path) -> None:
    """Runs every test once. A process knows which one it runs for by pytest's own variable, and so do its children."""
    copy = copied(folder / "all")
    for path in {place.path for place in places}:
        text = (copy / path).read_text()
        for number, place in enumerate(places):
            if place.path == path:  # no two on one line
                text = place.put(text, f"(_mutations_passed({number}) or ({place.before}))")
        (copy / path).write_text(text)
    (copy / "marks").mkdir()
    (copy / "marks" / "sitecustomize.py").write_text(MARKS.format(file=str(folder / PASSED)))
    (folder / PASSED).unlink(missing_ok=True)
    done = run(copy, "-n", "2", MUTATIONS_TIMES=str(folder / TIMES))
    print(*done.stdout.splitlines()[-12:], sep="\n", flush=True)


def meets(mutation: Mutation, tests: list[str], seconds: float, folder: Path) -> str:
    """The name of the test that found it, or why none did."""
    if not tests:
        return "nobody passes it"
    copy = copied(folder)
    file = copy / mutation.path
    file.write_text(mutation.put(file.read_text(), mutation.after))
    listed = folder / "listed.txt"
    listed.write_text("\n".join(tests))
    try:
        done = run(copy, "-x", *{test.partition("::")[0] for test in tests}, seconds=seconds, **{LISTED: str(listed)})
    except subprocess.TimeoutExpired:
        return "found: hangs"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode == 0:
        return "missed"
    return f"found: {lines[0]}" if lines else f"found: pytest ended with {done.returncode}"


def quickest(tests: set[str], times: dict[str, float]) -> list[str]:
    """One test of each file first, since those of one file see alike; in either part the quickest first."""
    ordered = sorted((test for test in tests if test in times), key=lambda test: times[test])
    first = {test.partition("::")[0]: test for test in reversed(ordered)}
    return sorted(ordered, key=lambda test: (first[test.partition("::")[0]] != test, times[test]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=67)
    parser.add_argument("--number", type=int, default=60, help="how many mutations")
    parser.add_argument("--folder", type=Path, default=Path("mutations"), help="where copies and results lie")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    places = mutations(ROOT, options.seed)[: options.number]
    if not (folder / TIMES).exists():
        who_passes(places, folder)
    times = json.loads((folder / TIMES).read_text())
    passing: dict[int, set[str]] = {number: set() for number in range(len(places))}
    for line in (folder / PASSED).read_text().splitlines():
        number, _, test = line.partition(" ")
        passing[int(number)].add(test)

    def try_one(number: int) -> tuple[int, str]:
        result = folder / f"{number}.txt"
        if not result.exists():
            tests = quickest(passing[number], times)
            seconds = HANGS + 3 * sum(times[test] for test in tests)
            result.write_text(meets(places[number], tests, seconds, folder / f"copy-{number}"))
            print(number, places[number], len(tests), result.read_text(), sep=" | ", flush=True)
            shutil.rmtree(folder / f"copy-{number}", ignore_errors=True)
        return number, result.read_text()

    with ThreadPoolExecutor(2) as pool:
        results = dict(pool.map(try_one, range(len(places))))
    for number, result in results.items():
        print(f"{number:3} {'found ' if result.startswith('found') else 'MISSED'} {places[number]} | {result}")
    print(sum(result.startswith("found") for result in results.values()), "of", len(places), "found")


class Times:
    """What each test took that passed, in the process that all results come to."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:
        self.of[report.nodeid] = self.of.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.others.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: seconds for test, seconds in self.of.items() if test not in self.others}
        Path(os.environ["MUTATIONS_TIMES"]).write_text(json.dumps(passed))


def pytest_configure(config) -> None:
    if "MUTATIONS_TIMES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Times())


def pytest_collection_modifyitems(items) -> None:
    if LISTED in os.environ:
        order = {test: place for place, test in enumerate(Path(os.environ[LISTED]).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


if __name__ == "__main__":
    main()
