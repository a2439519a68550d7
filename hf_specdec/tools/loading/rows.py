"""Where rows of text come from: a file, one of this package's own sets of prompts, or a data set of the Hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import SpeculationError

Row = dict[str, Any] | str
"""the fields of a JSON line or of a data set's row; a line of plain text"""

MAX_LINE_BYTES = 1_000_000
"""A longer line is a file of another kind, or one that lost its line breaks."""

SETS = {path.stem: path for path in sorted((Path(__file__).parent / "sets").glob("*.jsonl"))}
"""Prompts that come with the package, twelve each, by name."""
PROMPT_SOURCES = (
    f"a set of this package ({', '.join(SETS)}), a data set of the Hub (ORG/NAME or ORG/NAME:SPLIT), or a file of JSON "
    "lines or of plain text with a prompt per line"
)
"""what is read here, for `--help`"""

ON_THE_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?")
SUFFIXES = (".json", ".jsonl", ".txt", ".md")
"""A name that ends so is a file's, whether it is there or not."""


def set_name(source: str | Path) -> str:
    """What the rows of a source are called in results: a file's name, or a data set's and its split where it is named,
    without folders."""
    source = str(source)
    found = ON_THE_HUB.fullmatch(source)
    if found is None or Path(source).suffix in SUFFIXES:
        return Path(source).stem
    name = found["repo"].rpartition("/")[2]
    return f"{name}-{found['split']}" if found["split"] else name


def read_rows(source: str | Path, split: str = "test") -> Iterator[tuple[str, Row]]:
    """Each row with the place it stands at, for messages; blank lines are left out.

    Args:
        source: a file of JSON lines (`.json` or `.jsonl`) or plain text, the name of one of `SETS`, or a data set as
            `ORG/NAME` or `ORG/NAME:SPLIT`: a repo of the Hub, or a folder of that name here.
        split: that of a data set where its name has none; its first one where it has no such split.

    Raises:
        SpeculationError: there is no such source, or it cannot be read.
    """
    path, name = Path(source), str(source)
    try:
        if path.exists() and not path.is_dir():
            return _of_file(path)
        if name in SETS:
            return _of_file(SETS[name])
        found = ON_THE_HUB.fullmatch(name)
        if found and (Path(found["repo"]).is_dir() or not (path.parent.is_dir() or path.suffix in SUFFIXES)):
            return _of_data_set(found["repo"], found["split"], split)
        kind = "it is a folder" if path.is_dir() else "there is no such file"
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        kind = error.strerror or str(error)
    raise SpeculationError(
        f"cannot read {source}: {kind}. Give a file, a set of this package ({', '.join(SETS)}), or a data set of the "
        "Hub as ORG/NAME or ORG/NAME:SPLIT"
    )


def _of_file(path: Path) -> Iterator[tuple[str, Row]]:
    is_json = path.suffix in (".json", ".jsonl")
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        yield where, _fields(where, line) if is_json else line


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of the lines that are not blank."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise SpeculationError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes; "
                        "put each prompt on a line of its own, as JSON lines"
                    )
                if text := line.decode("utf-8").strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise SpeculationError(f"{path}, line {number} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SpeculationError(f"cannot read {path}: {error.strerror or error}") from error


def _fields(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpeculationError(f"{where} is not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise SpeculationError(f"{where} must be a JSON object, got {type(row).__name__}")
    return row


def _of_data_set(repo: str, split: str | None, usual: str) -> Iterator[tuple[str, Row]]:
    """Rows of the first configuration (or of `main`), through the library `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise SpeculationError(
            f"{repo} is read with the library datasets, which is not installed: "
            "pip install 'hf-specdec[data]', or give a file"
        ) from error
    try:
        try:
            rows = _load(datasets, repo, split, usual)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # It is never run; the Hub keeps what it would have made.
            rows = _load(datasets, repo, split, usual, revision="refs/convert/parquet")
        for number, row in enumerate(rows, start=1):
            yield f"{repo}, row {number}", row
    except SpeculationError:
        raise
    except Exception as error:  # of the network, of the Hub, of a file format
        raise SpeculationError(
            f"cannot read the data set {repo}: {type(error).__name__}: {error}. "
            "Give its name as ORG/NAME or ORG/NAME:SPLIT, or a file of JSON lines"
        ) from error


def _load(datasets: Any, repo: str, split: str | None, usual: str, **options: Any) -> Any:
    configurations = datasets.get_dataset_config_names(repo, **options)
    name = "main" if "main" in configurations else configurations[0]
    splits = datasets.get_dataset_split_names(repo, name, **options)
    if split is not None and split not in splits:
        raise SpeculationError(f"{repo} has no split {split!r}; it has {', '.join(splits)}")
    return datasets.load_dataset(repo, name, split=split or (usual if usual in splits else splits[0]), **options)
