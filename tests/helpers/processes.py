"""What tests ask the system for: a free port, a folder, who was started by whom, and time."""

import socket
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path


def free_port() -> int:
    """Of loopback; nothing listens there at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@cache
def _session() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hf_specdec-tests-")


def folder_of_the_session() -> Path:
    """A new one, which goes when the session ends."""
    return Path(tempfile.mkdtemp(dir=_session().name))


def children(parent: int) -> list[int]:
    """Processes that another has started and that are still there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(file.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(file.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
