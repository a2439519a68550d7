"""Files of our own: where they are kept, and how they get there whole."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import constants


def kept_in(name: str) -> Path:
    """The folder, beside what the Hub has sent, of what may be deleted at any time."""
    return Path(constants.HF_HOME) / "hf_specdec" / name


def digest(content: Any) -> str:
    """A hash of JSON values, to tell contents apart."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader finds either all of the new text or what was there before, whoever else writes
    it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
