"""The scripts of `docs/laboratory`, as modules."""

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "laboratory"


def script(name: str) -> Any:
    """Scripts import each other, and so their folder is on the path from the first one on."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
