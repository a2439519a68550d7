"""One thread per worker, so that float32 results and times do not depend on how many tests run beside each other."""

import gc
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Iterator

import pytest
import warm_python
from processes import until

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


OWN = {"real": "real_time", "set": "set_times"}
"""clocks, whatever `--clock` says, of tests that are so marked"""
GRID = 10
"""of the cells of a test marked `grid` one in so many runs by default, always the same ones; all with `-m grid`. Of one
marked `grid(pairs=True)` those run in which any two values meet: few where there are three arguments and more"""


def pytest_addoption(parser):
    parser.addoption(
        "--clock", choices=["set", "real", "jumping"], default="set",
        help="what tests that are not about real time go by; whichever it is, they pass",
    )  # fmt: skip
    parser.addoption("--captured", action="store_true", help="forwards run over static buffers, as they do on a GPU")


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test asserts depends on what forwards take on this machine: they take set times."""
    import clocks

    clocks.forget()
    kind = request.config.getoption("--clock")
    kind = next((kind for kind, mark in OWN.items() if request.node.get_closest_marker(mark)), kind)
    if kind == "real":
        yield
        return
    with clocks.set_times() if kind == "set" else clocks.jumping(zlib.crc32(request.node.nodeid.encode())):
        yield


@pytest.fixture(autouse=True)
def adapting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls go by that clock, and not by what a machine has measured before, but where a test is about just that."""
    import clocks

    if request.node.get_closest_marker("measured"):
        yield
        return
    with clocks.adapting():
        yield


@pytest.fixture(autouse=True)
def python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that tests start have torch and transformers at once, unless a test is about just that."""
    if request.node.get_closest_marker("fresh_python"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python.executable())
        patch.setattr("multiprocessing.spawn._python_exe", os.fsencode(sys.executable))
        yield


@pytest.fixture(autouse=True)
def tried_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of models of one kind the first is tried, but where a test is about just that."""
    if request.node.get_closest_marker("tries"):
        yield
        return
    import known_kinds

    with known_kinds.tried_once():
        yield


@pytest.fixture(autouse=True)
def captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--captured` forwards are captured on a CPU, too, unless a call says how they run."""
    if not request.config.getoption("--captured"):
        yield
        return
    if request.node.get_closest_marker("eager"):
        pytest.skip("about forwards that are not captured")
    from hf_specdec.target import capturable

    # Not the test's own monkeypatch, which is to be undone before the clock is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturable, "BY_ITSELF", ("cpu",))
        yield


def pytest_collection_modifyitems(config, items):
    """Tests marked slow or shared run only when asked for with `-m`, those marked grid in part."""
    if config.getoption("-m"):
        return
    skip, grids = pytest.mark.skip(reason="run with pytest -m"), {}
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "shared")):
            item.add_marker(skip)
        elif item.get_closest_marker("grid"):
            grids.setdefault(item.function, []).append(item)
    for cells in grids.values():
        covering = cells[0].get_closest_marker("grid").kwargs.get("pairs", False)
        for item in _beside_a_covering(cells) if covering else _nine_in_ten(cells):
            item.add_marker(skip)


def _nine_in_ten(cells):
    """What is left out of other grids; of every test a cell runs."""
    return [cell for cell in cells[1:] if zlib.crc32(cell.nodeid.encode()) % GRID]


def _beside_a_covering(cells):
    """What can be left out of a grid, always the same: in the others any two values of different arguments meet."""
    pairs = {cell: set(itertools.combinations(sorted(_values(cell)), 2)) for cell in cells}
    cells = sorted(cells, key=lambda cell: zlib.crc32(cell.nodeid.encode()))
    missing = set().union(*pairs.values())
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        cells.remove(best)
    return cells


def _values(cell):
    """One number of each `parametrize`: its values are the same objects in all cells."""
    given = cell.callspec.params
    for mark in cell.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple(names), tuple(id(given[name.strip()]) for name in names)


def pytest_collection_finish(session):
    """To look for garbage among all that was imported takes a quarter of a second, and some calls do it every time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        sys.modules["torch"].manual_seed(0)  # what was drawn in other tests says nothing of this one


@pytest.fixture
def no_decoder_is_left():
    """Whatever became of its requests, a `BatchDecoder` that was closed leaves no thread behind."""
    yield
    until(lambda: not any(thread.name == "BatchDecoder" for thread in threading.enumerate()))


@pytest.fixture
def width_costs_nothing(monkeypatch):
    """Whatever was drafted is verified: for tests that count calls, which must not depend on what forwards took, and
    for those whose thousands of rows no draft would pay for."""
    from hf_specdec.budget import Advance, Cost
    from hf_specdec.drafters import trees

    monkeypatch.setattr(trees, "MANY", 1 << 20)
    monkeypatch.setattr(Cost, "tried", lambda *_: None)
    monkeypatch.setattr(Cost, "most", lambda *_: 1 << 20)
    monkeypatch.setattr(Cost, "round", lambda *_: lambda width: 1.0)
    monkeypatch.setattr(Advance, "tokens", lambda _, gained: sum(gained))
