"""Checks that results can be written, made before the work begins."""

import tempfile
from pathlib import Path

from ...errors import SpeculationError


def writable_folder(folder: str | Path, name: str = "output") -> Path:
    """The folder, made if it is not there.

    Args:
        name: of the argument, for the message.

    Raises:
        SpeculationError: nothing can be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        raise SpeculationError(
            f"cannot write to {name} {str(folder)!r}: {error.strerror or error}; name another place"
        ) from error


def writable_file(file: str | Path, name: str) -> Path:
    """The file, in a folder that is made if it is not there.

    Raises:
        SpeculationError: no file can be written there.
    """
    if Path(file).is_dir():
        raise SpeculationError(f"{name} {str(file)!r} is a folder; name a file")
    writable_folder(Path(file).parent, name)
    return Path(file)
