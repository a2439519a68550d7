"""The folder that a training writes to. It holds one training only; an interrupted one goes on there."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SpeculationError
from ..files import write_whole


def hold_to(path: Path, manifest: dict[str, Any]) -> None:
    """Write down what a folder's training is made of; where that is there already, compare.

    Args:
        path: of the file that holds it.
        manifest: what has to be equal in later runs.

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
    """Within the block, Ctrl-C prints `advice` and stays a `KeyboardInterrupt`."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nstopped; {advice}", file=sys.stderr)
        raise
