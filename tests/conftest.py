"""One thread per worker, so that float32 results and times do not depend on how many tests run beside each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(config, items):
    """Tests marked slow or shared run only when asked for with `-m`."""
    import pytest

    if config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="run with pytest -m")
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "shared")):
            item.add_marker(skip)


def pytest_runtest_setup(item):
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
