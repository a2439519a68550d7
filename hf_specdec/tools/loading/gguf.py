"""GGUF files as folders that load like any other: converted once, and kept in the user's cache."""

import hashlib
import sys
import tempfile
from functools import cache
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import cached_file

from ...errors import SpeculationError
from ...files import kept_in
from ...target.devices import DTYPES
from ..showing import quiet


def located(name: str, file: str | None, revision: str | None = None) -> Path:
    """A GGUF file, downloaded where it has to be.

    Args:
        name: the file itself, or the folder or Hub repo that it lies in.
        file: its name there.

    Raises:
        SpeculationError: there is no such file.
    """
    if file is None or name.endswith(".gguf"):
        if file is not None:
            raise SpeculationError(f"{name!r} is a GGUF file already; leave out gguf_file={file!r}")
        if not Path(name).is_file():
            raise SpeculationError(f"there is no GGUF file {name!r}; check the path")
        return Path(name)
    try:
        return Path(cached_file(name, file, revision=revision))
    except (OSError, ValueError) as error:
        raise SpeculationError(f"cannot find gguf_file {file!r} in {name!r}: {_first_line(error)}") from error


def converted(file: Path, dtype: str) -> Path:
    """A folder with the file's model, every weight in this dtype, and its tokenizer.

    The first call makes it, which takes seconds to minutes. Later calls recognise the file by its content, whatever its
    name and place. The folder may be deleted at any time.

    Raises:
        SpeculationError: the file cannot be read, or the folder cannot be written.
    """
    try:
        facts = file.stat()
        identity = _content(file, facts.st_size, facts.st_ctime_ns)
    except OSError as error:
        raise SpeculationError(f"cannot read {file}: {error.strerror or error}") from error
    kept = kept_in("gguf") / f"{identity}-{dtype}"
    if kept.is_dir():
        return kept
    print(
        f"converting {file.name} to {dtype}, once; the result stays in {kept} and may be deleted at any time",
        file=sys.stderr,
    )
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that it gets there whole or not at all.
        with tempfile.TemporaryDirectory(prefix=".", dir=kept.parent) as folder:
            made = Path(folder) / kept.name
            with quiet():
                _convert(file, dtype, made)
            _move(made, kept)
    except ImportError as error:
        raise SpeculationError(f"{file.name} needs the package gguf; pip install 'hf-specdec[gguf]'") from error
    except Exception as error:  # a file can be wrong in many ways, and a disk full
        raise SpeculationError(f"cannot convert {file} into {kept}: {_first_line(error)}") from error
    return kept


@cache  # model and tokenizer are loaded one after the other
def _content(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def _convert(file: Path, dtype: str, folder: Path) -> None:
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=DTYPES[dtype]
    )
    model.save_pretrained(folder)


def _move(made: Path, kept: Path) -> None:
    try:
        made.rename(kept)
    except OSError:
        if not kept.is_dir():  # else another process was faster
            raise


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
