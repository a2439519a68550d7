"""Reading what others wrote: files stay inside their folder, JSON stays small and plain, tensors are checked by header.

Every function raises `SpeculationError` that names the file and the fix. Nothing is executed and nothing is written.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import SpeculationError, meant, one_line, shortened, shown

COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
MAX_JSON_BYTES = 1 << 20
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

FLOATING = ("F64", "F32", "F16", "BF16")
LIGHT = "F8_E4M3"
"""What weights may be stored as, rounded to half the bytes of bfloat16; it is a way to store, never one to compute."""

TensorInfo = tuple[str, tuple[int, ...]]
"""dtype as safetensors writes it (`"F32"`), and shape"""


def check_relative(name: Any, what: str) -> str:
    """A path such as `draft_model` or `drafters/disco`: below its folder, with forward slashes."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or re.search(r"[\\:\0*?\[]", str(name)):
        raise SpeculationError(
            f"{what} is {shown(name)}; it must be the name of a folder inside the repo, such as 'draft_model'"
        )
    return "/".join(parts)


def check_beside(name: Any, what: str) -> None:
    """Refuse what is no path such as `../draft` or `../drafter/draft_model`: one folder up, then down."""
    up, slash, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
    if up != ".." or not slash:
        raise SpeculationError(f"{what} is {shown(name)}; it must name a folder beside this one, such as '../draft'")
    check_relative(rest, f"{what}, behind '../',")


@dataclass(frozen=True)
class HubSource:
    """Where files come from: a folder, or a repo on the Hub. All but the first are as in `huggingface_hub`."""

    repo_or_folder: str | Path
    """a folder that exists here, else the id of a repo"""
    subfolder: str = ""
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    force_download: bool = False
    local_files_only: bool = False

    @property
    def is_local(self) -> bool:
        return Path(self.repo_or_folder).is_dir()

    def folder(self, patterns: Iterable[str]) -> Path:
        """The local folder that holds the files: as it is, or downloaded into the Hub cache.

        Args:
            patterns: names to download, relative to `subfolder`.
        """
        name, subfolder = self.repo_or_folder, self.subfolder
        if not isinstance(name, str | Path) or not str(name):
            raise SpeculationError(f"a drafter must be a local folder or a Hub repo such as 'org/name', got {name!r}")
        prefix = check_relative(subfolder, "subfolder") + "/" if subfolder else ""
        if self.is_local and self.revision is not None:
            raise SpeculationError(
                f"revision={self.revision!r} was given for the local folder {name}; leave it out, or name a repo on "
                "the Hub"
            )
        root = Path(name) if self.is_local else self.download([prefix + pattern for pattern in patterns])
        folder = root / prefix
        if not folder.is_dir():
            raise SpeculationError(f"{name} has no folder {subfolder!r}; check the name of the subfolder")
        if not any(folder.resolve().is_relative_to(place) for place in _allowed_roots(root)):
            raise SpeculationError(f"{folder} is a link that leads out of {root}; replace it with the folder itself")
        return folder

    def download(self, patterns: list[str]) -> Path:
        """The repo's snapshot folder in the Hub cache, with the files that match `patterns`."""
        repo = str(self.repo_or_folder)
        try:
            validate_repo_id(repo)
            root = snapshot_download(
                repo,
                allow_patterns=patterns,
                revision=self.revision,
                token=self.token,
                cache_dir=self.cache_dir,
                force_download=self.force_download,
                local_files_only=self.local_files_only,
            )
            return Path(root)
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            at = f" at revision {self.revision!r}" if self.revision else ""
            raise SpeculationError(
                f"{repo!r} is no local folder{_near(Path(repo))}, and could not be read from the Hub{at}; check the "
                "name and the revision, pass token= if the repo is private or gated, and check the connection. "
                f"The Hub's answer: {one_line(error)}"
            ) from error

    def at_commit_of(self, folder: Path) -> "HubSource":
        """The same, at the commit whose snapshot in the Hub cache `folder` lies in; a local folder as it is."""
        if self.is_local:
            return self
        snapshot = folder.parents[len(Path(self.subfolder).parts) - 1] if self.subfolder else folder
        return replace(self, revision=snapshot.name)


@contextmanager
def naming(path: Path, why: str = "") -> Iterator[None]:
    """What is refused within is said to be about this file.

    Args:
        why: what is wrong with the file where others raise something: configs and models refuse values in their own
            ways. Empty where others are no concern of the file's.
    """
    try:
        yield
    except SpeculationError as error:
        raise SpeculationError(f"{path}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        if not why:
            raise
        raise SpeculationError(f"{path} {why}: {shortened(one_line(error))}; correct it") from error


def taken(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The options of these names; the others are left in `options`."""
    return {name: options.pop(name) for name in names if name in options}


def _near(path: Path) -> str:
    """The folder beside a path that is named nearly like it, for a message."""
    with suppress(OSError):
        return meant(path.name, [folder.name for folder in path.parent.iterdir() if folder.is_dir()])
    return ""


def safe_file(folder: Path, name: str) -> Path:
    """`folder/name`, a regular file that no link takes out of the folder (the Hub cache links to its own blobs)."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        raise SpeculationError(
            f"{path} is missing; save the drafter again with save_pretrained(), or download it again"
        )
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise SpeculationError(
            f"{path} is a symbolic link that leads nowhere; replace it with the file itself ({error})"
        ) from error
    if not any(target.is_relative_to(root) for root in _allowed_roots(folder)):
        raise SpeculationError(f"{path} is a symbolic link out of its folder; replace it with the file itself")
    if not target.is_file():
        raise SpeculationError(f"{path} is not a regular file; replace it with the file that save_pretrained() writes")
    return path


def _allowed_roots(folder: Path) -> list[Path]:
    """The folder itself; in the Hub cache (`<repo>/snapshots/<commit>/...`) also the repo's `blobs`."""
    folder = folder.resolve()
    roots = [folder]
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots" and COMMIT_HASH.fullmatch(parent.name):
            roots.append((parent.parent.parent / "blobs").resolve())
    return roots


def check_no_pickles(folder: Path) -> None:
    """Refuse a folder with files that can only be read by running them."""
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            raise SpeculationError(
                f"{path} is a pickle, which runs code when it is read; store the weights as model.safetensors "
                "(save_pretrained() does) and remove this file"
            )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of at most 1 MiB, without duplicate keys, NaN or infinities."""
    path = safe_file(folder, name)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise SpeculationError(
            f"{path} has {size} bytes, more than the {MAX_JSON_BYTES} a config may have; check that this is a "
            "drafter's config"
        )
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SpeculationError(f"{path} cannot be read ({error}); check its permissions") from error
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SpeculationError(
            f"{path} is not plain JSON ({error}); save the drafter again with save_pretrained()"
        ) from error
    if not isinstance(content, dict):
        raise SpeculationError(f"{path} holds a JSON {type(content).__name__}; it must hold an object with options")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def tensor_infos(folder: Path, name: str) -> dict[str, TensorInfo]:
    """Types and shapes from the header of a safetensors file; no tensor is read.

    The header is consistent with the file's size, or the file is refused.
    """
    path = safe_file(folder, name)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise SpeculationError(
            f"{path} is not a whole safetensors file ({error}); download it again, or save the drafter again"
        ) from error


def read_tensors(
    folder: Path, name: str, expected: dict[str, Tensor], unused: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must have exactly the names, types and shapes of `expected`; in the
    place of bfloat16 a file may hold float8, which is read as bfloat16. Those that are `unused` may be there."""
    found, path = tensor_infos(folder, name), folder / name
    wanted = {key: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in expected.items()}
    if missing := sorted(wanted.keys() - found.keys()):
        raise SpeculationError(f"{path} lacks the weights {', '.join(missing)}; save the drafter again")
    if unexpected := sorted(found.keys() - wanted.keys() - set(unused)):
        raise SpeculationError(
            f"{path} has weights that the drafter does not know: {', '.join(unexpected)}; "
            "remove them, or correct drafter_type and the options in config.json"
        )
    for key, (dtype, shape) in [(key, known) for key, known in found.items() if key in wanted]:
        if (dtype, shape) != wanted[key] and (dtype, wanted[key]) != (LIGHT, ("BF16", shape)):
            raise SpeculationError(
                f"{path}: {key} is {dtype}{list(shape)}, but by config.json it must be "
                f"{wanted[key][0]}{list(wanted[key][1])}; correct config.json, or save the drafter again"
            )
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).to(tensor.dtype) for key, tensor in expected.items()}
    if bad := first_not_finite(tensors.items()):
        raise SpeculationError(f"{path}: {bad} holds NaN or infinite values; train the drafter again")
    return tensors


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of a plain floating tensor with a NaN or an infinity; packed and meta ones are not looked at."""
    for name, tensor in tensors:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and DTYPE_NAMES.get(tensor.dtype) in FLOATING
        if plain and tensor.numel() and not tensor.is_meta:
            ends = torch.stack(torch.aminmax(tensor.detach()))  # carries a NaN along, and needs no copy of the tensor
            if not bool(ends.isfinite().all()):
                return name
    return None
