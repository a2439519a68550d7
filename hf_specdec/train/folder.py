"""The folder that a training writes to: it holds one training only, and an interrupted one goes on."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SpeculationError


def write_whole(path: Path, text: str) -> None:
    """Write a file anew: whoever reads it finds all of it, or what was there before."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def hold_to(path: Path, manifest: dict[str, Any]) -> None:
    """Write down what a folder is made of, or compare.

    Args:
        path: of the manifest, in the folder.

    Raises:
        SpeculationError: the folder was begun with something else.
    """
    if not path.exists():
        write_whole(path, json.dumps(manifest, indent=2) + "\n")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(name for name in manifest if manifest[name] != found.get(name))
    except (ValueError, AttributeError, OSError) as error:
        raise SpeculationError(f"{path} is damaged ({error}); remove {path.parent}, or name another folder") from error
    if different:
        raise SpeculationError(
            f"{path.parent} holds a training with another {', '.join(different)}; name another folder, or "
            "remove this one"
        )


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ctrl-C says what becomes of the work, and stays a `KeyboardInterrupt`."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nstopped; {advice}", file=sys.stderr)
        raise
